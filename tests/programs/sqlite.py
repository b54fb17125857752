# Bank accounts in SQLite: writers that move money and record committed transfers in a file
# elsewhere; readers that sum up the money meanwhile; and a check of the database.
import os, sqlite3, sys

ACCOUNTS, MONEY = 200, 1000


def open_it(path):
    db = sqlite3.connect(path, timeout=100, isolation_level=None)
    db.execute("PRAGMA synchronous = NORMAL")
    # Pages are read through a mapping, and written with write(2).
    assert db.execute("PRAGMA mmap_size = 100000000").fetchone()[0] > 0
    return db


def make(path, mode):
    db = sqlite3.connect(path, isolation_level=None)
    assert db.execute(f"PRAGMA journal_mode = {mode}").fetchone()[0] == mode
    db.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, money INTEGER NOT NULL)")
    db.execute(
        "CREATE TABLE transfer (writer TEXT, n INTEGER, ballast BLOB, PRIMARY KEY (writer, n))"
    )
    db.execute("BEGIN")
    db.executemany("INSERT INTO account VALUES (?, ?)", [(n, MONEY) for n in range(ACCOUNTS)])
    db.execute("COMMIT")


def write(path, writer, acknowledged, limit, stop):
    """Moves money until `limit` transfers are made or `stop` exists. Records each committed one."""
    db, n = open_it(path), 0
    with open(acknowledged, "a") as committed:
        while n < limit and not os.path.exists(stop):
            n += 1
            source, target = (n * 7 + hash(writer)) % ACCOUNTS, (n * 13 + 1) % ACCOUNTS
            db.execute("BEGIN IMMEDIATE")
            db.execute("UPDATE account SET money = money - 1 WHERE id = ?", (source,))
            db.execute("UPDATE account SET money = money + 1 WHERE id = ?", (target,))
            db.execute(
                "INSERT INTO transfer VALUES (?, ?, randomblob(?))", (writer, n, n % 50 * 100)
            )
            if n % 10 == 0:
                db.execute("DELETE FROM transfer WHERE writer = ? AND n = ?", (writer, n - 5))
            db.execute("COMMIT")
            committed.write(f"{n}\n")
            committed.flush()


def read(path, stop):
    db, seen = open_it(path), 0
    while not os.path.exists(stop):
        db.execute("BEGIN")
        (money,) = db.execute("SELECT sum(money) FROM account").fetchone()
        (rows,) = db.execute("SELECT count(*) FROM transfer").fetchone()
        (again,) = db.execute("SELECT count(*) FROM transfer").fetchone()
        db.execute("COMMIT")
        assert money == ACCOUNTS * MONEY and rows == again and rows >= seen, (
            money,
            rows,
            again,
            seen,
        )
        seen = rows - rows // 10 - 10


def check(path, acknowledged):
    """The database is whole, and has every transfer that these files acknowledge."""
    db = open_it(path)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    (money,) = db.execute("SELECT sum(money) FROM account").fetchone()
    assert money == ACCOUNTS * MONEY, money
    for file in acknowledged:
        writer = os.path.basename(file).split(".")[0]
        there = {n for n, in db.execute("SELECT n FROM transfer WHERE writer = ?", (writer,))}
        wanted = {int(line) for line in open(file) if line.endswith("\n")}
        removed = {n - 5 for n in there | wanted if n % 10 == 0}
        assert wanted - removed <= there, f"{writer}: lost {sorted(wanted - removed - there)}"


step, path, *more = sys.argv[1:]
if step == "make":
    make(path, *more)
elif step == "write":
    write(path, more[0], more[1], int(more[2]), more[3])
elif step == "read":
    read(path, *more)
elif step == "check":
    check(path, more)
else:
    sys.exit(f"no step {step}")
