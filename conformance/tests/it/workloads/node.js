// Timers, promises, a worker on a thread of its own, the pool's threads and a heap of objects,
// checked in each tick.
const fs = require('fs');
const crypto = require('crypto');
const { Worker } = require('worker_threads');

const boot = crypto.randomBytes(6).readUIntBE(0, 6);
const things = new Map();
for (let number = 0; number < 20000; number++) things.set(number, { number, text: `${number / 7}` });
const digest = () => crypto.createHash('sha256').update(JSON.stringify([...things])).digest('hex');
const expected = digest();
const shared = new Int32Array(new SharedArrayBuffer(4));
const work = 'const { workerData: n } = require("worker_threads"); setInterval(() => Atomics.add(n, 0, 1), 50)';
new Worker(work, { eval: true, workerData: shared });

let count = 0, wrong = '', seen = -1;
const tick = async () => {
  count += 1;
  await fs.promises.writeFile('/state/line', `${count}\n`);
  if (await fs.promises.readFile('/state/line', 'utf8') !== `${count}\n`) wrong ||= 'a file changed';
  if (count % 20 === 0) {
    if (digest() !== expected) wrong ||= 'an object changed';
    // When the worker has stopped, this goes on no more.
    while (Atomics.load(shared, 0) === seen) await new Promise((done) => setTimeout(done, 5));
    seen = Atomics.load(shared, 0);
  }
  const said = JSON.stringify({ boot, count, threads: 2, wrong });
  fs.writeFileSync('/state/keep.new', said);
  fs.renameSync('/state/keep.new', '/state/keep');
  setTimeout(tick, 50);
};
setTimeout(tick, 500);
