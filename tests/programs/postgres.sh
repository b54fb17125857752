# PostgreSQL: a cluster with checksums and a tablespace; pgbench at full speed; all its processes
# killed with -9, and its own recovery. It must not run as root. $OUT is a directory elsewhere.
PATH=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1):$PATH
export PGDATA=$PWD/data PGHOST=$PWD PGDATABASE=postgres PGUSER=bench
export PGOPTIONS='-c client_min_messages=warning'

start() { pg_ctl -s -w -t 60 -l "$OUT/log" start || { tail -n 20 "$OUT/log"; return 1; }; }

# Stops the server and waits until its process is gone, because the next start looks for it.
stop() {
    main=$(head -n 1 data/postmaster.pid)
    pg_ctl -s -w -t 60 -m "${1-fast}" stop
    while test -d "/proc/$main"; do :; done
}

ask() { psql -XAtqc "$1"; }
count() { ask 'select count(*) from pgbench_history'; }

failed() { stop immediate; }

kill_all() {
    main=$(head -n 1 data/postmaster.pid)
    all="$main $(cat "/proc/$main/task/$main/children")"
    kill -9 $all
    for process in $all; do while test -d "/proc/$process"; do :; done; done
}

# Checks the sums that each transaction of pgbench keeps equal.
consistent() {
    test "$(ask 'select count(*) from pgbench_accounts')" = 100000
    test "$(ask 'select count(distinct s) from (select sum(abalance) s from pgbench_accounts
        union all select sum(tbalance) from pgbench_tellers
        union all select sum(bbalance) from pgbench_branches
        union all select sum(delta) from pgbench_history) x')" = 1
    pg_amcheck --heapallindexed
}

begin() { # a cluster that runs, with the tables of pgbench
    initdb -D data -U bench -A trust --data-checksums --wal-segsize=1 --no-sync > "$OUT/said"
    cat >> data/postgresql.conf <<-END
	listen_addresses = ''
	unix_socket_directories = '$PWD'
	shared_buffers = 16MB
	max_wal_size = 16MB
	min_wal_size = 5MB
	END
    start
    mkdir space
    ask "create tablespace elsewhere location '$PWD/space'"
    ask 'create extension amcheck'
    pgbench -i -q -s 1 --index-tablespace=elsewhere 2> "$OUT/said"
    ask 'alter table pgbench_tellers set tablespace elsewhere'
}

work() {
    begin
    pgbench -n -c 4 -j 2 -T 2 > "$OUT/bench"
    consistent
    # Killed at full speed, it recovers all acknowledged transactions.
    pgbench -n -c 4 -j 2 -T 60 > "$OUT/bench" 2>&1 & bench=$!
    before=$(count)
    enough=$((before + 500))
    while test "$before" -lt $enough; do before=$(count); done
    kill_all
    fails wait $bench
    start
    grep -q 'redo done' "$OUT/log"
    test "$(count)" -ge "$before"
    consistent
    ask 'vacuum full pgbench_accounts'
    stop
    pg_checksums --check > "$OUT/said"
}

holds() {
    pg_checksums --check > "$OUT/said"
    start
    consistent
    stop
}

more() {
    start
    pgbench -n -c 4 -j 2 -t 50 > "$OUT/bench"
    ask 'drop table pgbench_history'
    ask 'vacuum full'
    stop
    rm -r data/base/1 space
}

# Runs until the server is stopped.
live() { pgbench -n -c 4 -j 2 -T 100 > "$OUT/bench" 2>&1 || true; }

halt() { stop immediate; }

# A checkpoint that was taken while it ran equals a crash at that time: no earlier committed
# transaction is lost.
lived() {
    : > "$OUT/log"
    start
    grep -q 'redo done' "$OUT/log"
    test "$(count)" -ge "$(cat "$OUT/then")"
    consistent
    stop
    pg_checksums --check > "$OUT/said"
}
