// Runs in a Java virtual machine (Rhino): threads of a pool, a queue between them, objects that
// outlive collections and many that do not.
var boot = Math.floor(Math.random() * 281474976710656);
var pool = java.util.concurrent.Executors.newScheduledThreadPool(4);
var hits = new java.util.concurrent.atomic.AtomicLong(0);
var queue = new java.util.concurrent.ArrayBlockingQueue(16);
pool.scheduleAtFixedRate(function () { hits.incrementAndGet(); }, 0, 50, java.util.concurrent.TimeUnit.MILLISECONDS);
pool.execute(function () { for (var n = 1; ; n++) queue.put(n); });
var things = new java.util.HashMap();
for (var number = 0; number < 20000; number++) things.put(java.lang.Integer.valueOf(number), 'thing ' + number);
var expected = things.hashCode();
var count = 0, wrong = '', seen = -1;
var state = java.nio.file.Paths.get('/state/keep'), fresh = java.nio.file.Paths.get('/state/keep.new');
while (true) {
  count += 1;
  if (Number(queue.take()) !== count) wrong = wrong || 'the queue brings something else';
  java.lang.reflect.Array.newInstance(java.lang.Byte.TYPE, 1 << 20);
  if (count % 20 === 0) {
    java.lang.System.gc();
    if (things.hashCode() !== expected) wrong = wrong || 'an object changed';
    // When the timer has stopped, this goes on no more.
    while (hits.get() === seen) java.lang.Thread.sleep(5);
    seen = hits.get();
  }
  var said = JSON.stringify({ boot: boot, count: count, threads: 5, wrong: wrong });
  java.nio.file.Files.writeString(fresh, said);
  java.nio.file.Files.move(fresh, state, java.nio.file.StandardCopyOption.ATOMIC_MOVE);
  java.lang.Thread.sleep(50);
}
