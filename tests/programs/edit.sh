# Editors and similar programs: vim in all its ways to save, sed and perl in place, and patch; and
# find, which must find the results.
# Waits until a file written now is newer than this one, even if the filesystem's clock is coarse.
later_than() {
    until touch "$1.probe" && test "$1.probe" -nt "$1"; do :; done
    rm "$1.probe"
}

vim() { command vim -Nu NONE -i NONE -es "$@" < /dev/null; }

work() {
    for n in 1 2 3 4; do seq 100 | sed "s/^/line $n /" > "file$n"; done
    mkdir sub
    cp file1 sub/script
    chmod 751 sub/script
    setfattr -n user.kept -v yes sub/script
    ln file4 file4.twin
    ln -s sub/script link
    touch reference
    later_than reference

    # vim renames the file and writes a new one, or writes it in place; with a swap file, a backup
    # and an undo file.
    vim -c 'set backup backupskip= backupcopy=no' -c '%s/line/Line/' -c wq file1
    grep -qx 'Line 1 100' file1
    grep -qx 'line 1 100' file1~
    vim -c 'set backupcopy=yes undofile' -c '2,$d' -c wq file2
    test "$(cat file2)" = 'line 2 1'
    test -s .file2.un~
    before=$(stat -c '%i %a' sub/script)
    vim -c 'set backupskip= backupcopy=yes writebackup' -c '1d' -c wq link
    test "$(stat -c '%i %a' sub/script)" = "$before"
    test "$(getfattr --only-values -n user.kept sub/script)" = yes
    test -L link
    vim -c 'set backupcopy=auto' -c '$d' -c wq file4
    test "$(stat -c %h file4)" = 2
    cmp file4 file4.twin
    # On a terminal, as a user does; the swap file exists meanwhile.
    printf 'iterminal\n\033:w\r:!ls -a > during\r\r:q\r' > keys
    TERM=xterm script -qec 'command vim -Nu NONE -i NONE file3' /dev/null < keys > said
    test "$(head -n 1 file3)" = terminal
    grep -qx '.file3.swp' during
    test ! -e .file3.swp

    # sed -i replaces the file; it replaces a link unless it is told to follow it.
    sed -i.bak 's/Line 1 50$/FIFTY/' file1
    grep -qx FIFTY file1
    grep -qx 'Line 1 50' file1.bak
    sed -i --follow-symlinks 's/line 1 7$/SEVEN/' link
    grep -qx SEVEN sub/script
    test -L link
    perl -i -pe 's/line 3 9$/NINE/' file3
    grep -qx NINE file3

    # A patch that applies, with a file that it creates and one that it removes; its reversal; and a
    # patch that does not apply.
    mkdir old new
    seq 50 > old/a
    seq 50 | sed 's/^25$/changed/' > new/a
    echo gone > old/gone
    echo made > new/made
    diff -ruN old new > all.patch || true
    cp -a old patched
    patch -s -d patched -p1 < all.patch
    diff -r new patched
    patch -s -R -d patched -p1 < all.patch
    diff -r old patched
    sed -i 's/^2[0-9]$/other/' patched/a
    fails patch -s -d patched -p1 < all.patch > said
    test -s patched/a.rej

    # Exactly the changes since the reference.
    find . -type f -newer reference ! -path './old/*' ! -path './new/*' ! -path './patched/*' \
        ! -name said ! -name newer | sort > newer
    printf './%s\n' .file2.un~ all.patch during file1 file1.bak file2 file3 file4 file4.twin keys \
        sub/script | sort | diff - newer
    find . -type f -printf '%p %T@ %i\n' ! -name said ! -name times | grep -v -e said -e times |
        sort > times
}

holds() {
    find . -type f -printf '%p %T@ %i\n' | grep -v -e said -e times | sort | diff times -
    test "$(find . -name 'file[0-9]' -newer reference | wc -l)" = 4
    test -z "$(find . -samefile file4 ! -name 'file4*')"
    test "$(find . -samefile file4 | wc -l)" = 2
    vim -c 'wundo! said' -c 'rundo .file2.un~' -c 'undo' -c 'w! said' -c 'q!' file2
    test "$(wc -l < said)" = 100
}

more() {
    vim -c '%d' -c wq file1
    sed -i d file2 file3
    patch -s -R -d new -p1 < all.patch
    rm file4 link reference
    find . -name '*.bak' -delete
}
