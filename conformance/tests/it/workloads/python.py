"""Threads, generators, a child behind pipes and a few megabytes of objects, checked in each tick."""

import hashlib
import json
import os
import subprocess
import threading
import time


def fibonacci():
    first, second = 0, 1
    while True:
        yield first
        first, second = second, (first + second) % (1 << 61)


def digest(things):
    return hashlib.sha256(json.dumps(things, sort_keys=True).encode()).hexdigest()


def counts_on(numbers, place):
    while True:
        numbers[place] += 1
        time.sleep(0.05)


boot = int.from_bytes(os.urandom(6), "big")
things = {str(number): [number, number / 7, "x" * (number % 50)] for number in range(20000)}
expected = digest(things)
numbers = [0] * 4
for place in range(4):
    threading.Thread(target=counts_on, args=(numbers, place), daemon=True).start()
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
child = subprocess.Popen(["busybox", "cat"], **pipes)
running, log = fibonacci(), open("/state/log", "w+", buffering=1)
count, wrong = 0, ""
while True:
    count += 1
    value = next(running)
    child.stdin.write(f"{value}\n")
    child.stdin.flush()
    if int(child.stdout.readline()) != value:
        wrong = wrong or "the pipes bring something else"
    log.write(f"{count}\n")
    if count % 20 == 0:
        fresh = fibonacci()
        if [next(fresh) for _ in range(count)][-1] != value:
            wrong = wrong or "the generator lost its place"
        if digest(things) != expected:
            wrong = wrong or "an object changed"
        # When one has stopped, this goes on no more.
        before = list(numbers)
        while any(now == then for now, then in zip(numbers, before)):
            time.sleep(0.005)
        log.seek(0)
        if log.read().split() != [str(line + 1) for line in range(count)]:
            wrong = wrong or "the log has other lines"
    with open("/state/keep.new", "w") as file:
        said = {"boot": boot, "count": count, "threads": threading.active_count(), "wrong": wrong}
        json.dump(said, file)
    os.rename("/state/keep.new", "/state/keep")
    time.sleep(0.05)
