"""Files that are written to in each way there is, and must be what memory knows of them."""

import hashlib
import json
import mmap
import os
import random
import time

LENGTH = 512 << 10


def write(path, content):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(file, content, 0)
    os.close(file)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def digest(content):
    return hashlib.sha256(content).digest()


boot = int.from_bytes(os.urandom(6), "big")
seldom = {f"/state/seldom-{number}": b"" for number in range(24)}
for path in seldom:
    content = os.urandom(LENGTH)
    write(path, content)
    seldom[path] = digest(content)
os.makedirs("/state/within", exist_ok=True)
always, replaced, log = "/state/always", "/state/replaced", open("/state/log", "ab", buffering=0)
write(always, bytes(LENGTH))
write(replaced, bytes(LENGTH))
shared = open("/state/shared", "w+b")
shared.truncate(LENGTH)
mapped = mmap.mmap(shared.fileno(), LENGTH)
# What is being written when everything stops may be there, or not yet.
count, lines, wrong = 0, 0, ""


def check(what, is_so):
    global wrong
    if not is_so:
        wrong = wrong or f"{what} is not what it was, at {count}"


while True:
    for path, known in seldom.items():
        check(path, digest(read(path)) == known)
    before = count.to_bytes(4, "big") * (LENGTH // 4)
    check("the file that is written to always", read(always) == before)
    check("the file that is replaced", read(replaced) == before)
    check("the file that is mapped", read("/state/shared") == before)
    check("the log", os.path.getsize("/state/log") == lines * 65536)
    count += 1
    now = count.to_bytes(4, "big") * (LENGTH // 4)
    write(always, now)
    for place in range(0, LENGTH, 4096):
        mapped[place : place + 4096] = now[:4096]
    write("/state/within/new", now)
    os.rename("/state/within/new", replaced)
    log.write(count.to_bytes(8, "big") * 8192)
    lines += 1
    if lines == 100:
        log.truncate(0)
        lines = 0
    for path in random.sample(list(seldom), 3):
        known = os.stat(path)
        content = os.urandom(LENGTH)
        write(path, content)
        seldom[path] = digest(content)
        # As backups and archivers do.
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
    with open("/state/keep.new", "w") as file:
        said = {"boot": boot, "count": count, "threads": 1, "wrong": wrong}
        file.write(json.dumps(said))
    os.rename("/state/keep.new", "/state/keep")
    # Others have something to do, too.
    time.sleep(0.05)
