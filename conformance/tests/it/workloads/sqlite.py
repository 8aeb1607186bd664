"""One transaction that stays open, with more in it than its cache holds, until somebody wants it
committed by making the file `commit`."""

import json
import os
import sqlite3
import time

boot = int.from_bytes(os.urandom(6), "big")


def begin():
    base = sqlite3.connect("/state/base", isolation_level=None)
    base.execute("create table if not exists line (number integer primary key, text text)")
    base.execute("pragma cache_size = 10")
    base.execute("begin immediate")
    return base


base = begin()
count, committed, wrong = 0, 0, ""
while True:
    count += 1
    base.executemany(
        "insert into line values (?, ?)",
        [(count * 100 + part, f"{boot} {count} " + "x" * 200) for part in range(100)],
    )
    if os.path.exists("/state/commit"):
        base.execute("commit")
        reader = sqlite3.connect("/state/base", isolation_level=None)
        lines = reader.execute("select count(*), min(number), max(number) from line").fetchone()
        if lines != (count * 100, 100, count * 100 + 99):
            wrong = wrong or f"after {count} there are {lines}"
        if reader.execute("pragma integrity_check").fetchone() != ("ok",):
            wrong = wrong or "the file is damaged"
        reader.close()
        committed = count
        os.remove("/state/commit")
        # Restored files have other inodes, and SQLite begins nothing more on one that it takes for
        # another file (SQLITE_READONLY_DBMOVED).
        base.close()
        base = begin()
    with open("/state/keep.new", "w") as file:
        said = {"boot": boot, "count": count, "threads": 1, "wrong": wrong, "committed": committed}
        json.dump(said, file)
    os.rename("/state/keep.new", "/state/keep")
    time.sleep(0.05)
