# A table in which each transaction adds a row and removes the oldest one, and the check of it.
import sqlite3, sys

ROWS = 60


def body(seq, stamp):
    return bytes([(seq * 7 + stamp) % 251]) * ((seq * 997) % 6000)


def make(path):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(
        "CREATE TABLE row (seq INTEGER PRIMARY KEY, stamp INTEGER NOT NULL, body BLOB NOT NULL)"
    )
    db.close()


def write(mode, synchronous, count, stamp, path):
    db = sqlite3.connect(path, isolation_level=None, timeout=60)
    db.execute(f"PRAGMA journal_mode = {mode}")
    db.execute(f"PRAGMA synchronous = {synchronous}")
    db.execute("PRAGMA wal_autocheckpoint = 20")
    seq, stamp = int(count), int(stamp)
    while True:
        seq += 1
        print("begin", f"{seq}-{stamp}")
        # The test records what begins before it happens, however slow the machine is.
        if not sys.stdin.readline():
            return
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO row VALUES (?, ?, ?)", (seq, stamp, body(seq, stamp)))
        db.execute("DELETE FROM row WHERE seq <= ?", (seq - ROWS,))
        db.execute("COMMIT")
        print("done", seq)


def read(path):
    db = sqlite3.connect(path, isolation_level=None, timeout=60)
    sound = db.execute("PRAGMA integrity_check").fetchall()
    assert sound == [("ok",)], sound
    for seq, stamp, found in db.execute("SELECT seq, stamp, body FROM row ORDER BY seq"):
        assert found == body(seq, stamp), (seq, stamp, len(found))
        print(f"{seq}-{stamp}")


{"make": make, "write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
