# tar, rsync and cp -a: out of the tree, into it and within it, with hard links, ACLs, extended
# attributes, file capabilities, owners, modes, holes, fifos, sockets, devices, odd names and old
# times. $OUT is a directory elsewhere.

tree() { # all that a copy must keep
    python3 -I -S "$SNAPSHOT" "$1" quietly | sed -E 's/ (ino|ctime|atime)=-?[0-9]+//g'
}

same() { # TREE COPY [NAME]: but for that name
    tree "$1" | grep -v "^b'./${3-/}'" > "$OUT/wanted"
    test -s "$OUT/wanted"
    tree "$2" | diff "$OUT/wanted" -
}

make_tree() {
    mkdir -p "$1/dir/empty" "$1/shared"
    cd "$1"
    seq 1000 > dir/numbers
    head -c 2000000 /dev/urandom > dir/blob
    : > dir/nothing
    ln dir/numbers numbers-twin
    ln dir/numbers dir/empty/numbers-third
    printf x > with-attributes
    setfattr -n user.colour -v green with-attributes
    setfattr -n user.empty with-attributes
    setfattr -n trusted.secret -v 0x0001ff with-attributes
    setfattr -n user.of-a-directory -v yes dir
    printf x > capable
    setfattr -n security.capability -v 0x0100000200040000000000000000000000000000 capable
    setfacl -m u:7:rw,g:8:r,m::rw with-attributes
    setfacl -m u:9:rwx dir
    setfacl -d -m u:9:rwx,o::- dir
    mkdir dir/inherits
    echo inherited > dir/inherits/file
    truncate -s 50M sparse
    printf middle | dd of=sparse bs=1M seek=20 conv=notrunc status=none
    printf end | dd of=sparse bs=1 seek=52428797 conv=notrunc status=none
    mkfifo fifo
    mknod null c 1 3
    mknod block b 7 200
    python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
    ln -s dir/numbers link
    ln -s nowhere dangling
    printf x > "$(printf 'new\nline \\ \303\244 \377')"
    printf x > "$(printf '%0250d' 7)"
    touch setuid
    chown 1234:2345 dir/blob setuid
    chown -h 4321:5432 link
    chmod 6755 setuid
    chmod 2775 shared
    chmod 1777 dir/empty
    chmod 000 dir/nothing
    touch -d '1965-03-04 05:06:07.123456789' dir/numbers
    touch -h -d '2001-02-03 04:05:06.987654321' link
    touch -d '2038-01-20 00:00:00.000000001' shared
    cd - > /dev/null
}

round_trip() { # NAME FROM TO: by every program
    tar -C "$2" --xattrs --xattrs-include='*' --acls -S -cf "$3/$1.tar" --sort=name .
    mkdir "$3/$1-tar"
    tar -C "$3/$1-tar" --xattrs --xattrs-include='*' --acls -xpf "$3/$1.tar" 2> "$OUT/said"
    same "$2" "$3/$1-tar" socket # tar knows no sockets
    rsync -aHAXS --numeric-ids "$2/" "$3/$1-rsync"
    same "$2" "$3/$1-rsync"
    test -z "$(rsync -aHAXSni --numeric-ids --checksum --delete "$2/" "$3/$1-rsync")"
    cp -a "$2" "$3/$1-cp"
    same "$2" "$3/$1-cp"
}

work() {
    umask 022
    make_tree tree
    make_tree "$OUT/tree"
    cp -a tree/dir/blob "$OUT/tree/dir/blob"
    for made in tree "$OUT/tree"; do
        # Set the times that came from the clock to equal values.
        find $made ! -newermt 2025-01-01 -o -newermt 2037-01-01 -o \
            -exec touch -h -d '2020-01-01 00:00:00.5' {} +
    done
    same "$OUT/tree" tree
    round_trip within tree .
    round_trip out tree "$OUT"
    round_trip in "$OUT/tree" .
    # Holes stay holes.
    for copy in tree within-tar within-rsync within-cp in-tar in-rsync in-cp; do
        test "$(stat -c %b $copy/sparse)" -lt 1000
    done
    # An update in place, with deletions and a file that grew; and one in the other direction.
    echo more >> in-rsync/dir/inherits/file
    rm in-rsync/link
    mkdir in-rsync/extra
    rsync -aHAX --numeric-ids --delete --inplace "$OUT/tree/" in-rsync/
    same "$OUT/tree" in-rsync
    # Two backups that share unchanged files.
    cp -a tree backup1
    rsync -aHAX --numeric-ids --link-dest="$PWD/backup1" tree/ backup2
    test backup1/dir/blob -ef backup2/dir/blob
    test "$(stat -c %h backup2/dir/numbers)" = 6
}

holds() {
    for copy in tree within-rsync within-cp in-rsync in-cp; do same "$OUT/tree" $copy; done
    for copy in within-tar in-tar; do same "$OUT/tree" $copy socket; done
    tar --xattrs --xattrs-include='*' --acls -C tree -df within.tar
    test backup1/dir/blob -ef backup2/dir/blob
}

more() {
    setfacl -R -b within-cp
    setfattr -x trusted.secret within-tar/with-attributes
    chown -R 7:7 within-rsync
    rsync -a --delete in-cp/dir/ in-rsync/
    tar -C in-tar --recursive-unlink --overwrite -xf within.tar ./dir
    rm -rf tree backup1
}
