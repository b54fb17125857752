# SQLite with a write-ahead log, and with a rollback journal: four writers and two readers at a
# time, one writer killed. $OUT is a directory elsewhere, where the writers record acknowledged
# transfers.
bank() { PYTHONHASHSEED=0 /usr/bin/python3 -I "$PROGRAMS/sqlite.py" "$@"; }

together() { # DATABASE LIMIT: until each writer made that many transfers, or $OUT/stop is there
    rm -f "$OUT/read"
    writers=
    for n in 1 2 3 4; do
        bank write "$1" "$1$n" "$OUT/$1$n.committed" "$2" "$OUT/stop" & writers="$writers $!"
    done
    bank read "$1" "$OUT/read" & first=$!
    bank read "$1" "$OUT/read" & second=$!
    for writer in $writers; do wait "$writer"; done
    touch "$OUT/read"
    wait $first
    wait $second
}

work() {
    for mode in wal delete; do
        bank make $mode $mode
        together $mode 150
        # A writer that is killed loses no acknowledged transfer.
        /usr/bin/python3 -I "$PROGRAMS/sqlite.py" write \
            $mode ${mode}5 "$OUT/${mode}5.committed" 1000000 "$OUT/stop" & killed=$!
        until test "$(cat "$OUT/${mode}5.committed" 2> /dev/null | wc -l)" -ge 20; do :; done
        kill -9 $killed
        fails wait $killed
        bank check $mode "$OUT/$mode"?.committed
    done
}

holds() {
    for mode in wal delete; do bank check $mode "$OUT/$mode"?.committed; done
}

more() {
    mkdir -p "$OUT/more"
    OUT=$OUT/more
    rm delete
    bank make delete delete
    together delete 20
    bank check delete "$OUT"/delete?.committed
    head -c 100000 /dev/urandom | dd of=wal bs=4096 seek=3 conv=notrunc status=none
    fails bank check wal 2> said
}

begin() { bank make live wal; }

# Runs until $OUT/stop exists.
live() { together live 1000000; }

# Checks the transfers that were acknowledged when $OUT/then was written.
lived() { bank check live "$OUT/then"/live?.committed; }
