# A process that tries to get out of a tree. Each row of the table has a setup, which makes names in
# a directory of its own in the tree, and an action. The action's result goes to the observer, which
# knows the secrets outside.
#
#   attacker.py prepare BASE TREE OUT WHOSE
#       makes the names of the rows with an old setup in BASE, before BASE is mounted at TREE
#   attacker.py attack BASE TREE OUT
#       reads names of rows, runs each row, and prints its result
#   attacker.py list
#       prints the rows
#
# A row has one of four kinds:
#   ESCAPE     gets out on a plain directory, and nowhere else
#   WORKS      stays in, and has the same result everywhere
#   PROCESS    is not stopped by a mount alone, and fails in a confined process
#   CHECKPOINT attacks a checkpoint in the mount, and returns "refused" if that failed
import ctypes, errno, fcntl, json, mmap, os, select, signal, socket
import stat, struct, subprocess, sys, time

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
REVEALED = "REVEALED"
ROWS = {}


class Ctx:
    def __init__(self, place, base, tree, out, row):
        self.tree, self.base, self.out = tree, base, out
        self.dir = os.path.join(place, row.name)
        self.name = row.name

    def up(self, depth):
        """From a directory so many levels below the row's own to the one that holds the tree."""
        return "../" * (depth + 2)

    def at(self, path):
        return os.path.join(self.dir, path)


class Row:
    def __init__(self, kind, name, setup, act, old, root_only, one_disk):
        self.kind, self.name, self.old, self.setup, self.act = kind, name, old, setup, act
        self.root_only, self.one_disk = root_only, one_disk


def add(kind, name, setup, act, old=False, root_only=False, one_disk=False):
    """Adds a row. `one_disk` rows get out only if inside and outside are on one filesystem."""
    assert name not in ROWS, name
    ROWS[name] = Row(kind, name, setup, act, old, root_only, one_disk)


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "call")
    return result


def read(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, 1000)
    finally:
        os.close(fd)


def inode_text(path):
    info = os.stat(path)
    return f"ino:{info.st_ino};"


def write(path, flags=os.O_WRONLY, data=b"attacked"):
    fd = os.open(path, flags, 0o644)
    os.write(fd, data)
    os.close(fd)


# The shapes of links. Each makes a link `l` to the file `secret` outside and a link `d` to the
# directory outside, and returns their directory, relative to the row's own.


def links(c, at, file, dir_):
    os.makedirs(c.at(at), exist_ok=True)
    os.symlink(file, c.at(at + "/l"))
    os.symlink(dir_, c.at(at + "/d"))


def shape_absolute(c):
    links(c, ".", c.out + "/secret", c.out)


def shape_relative(c):
    links(c, ".", c.up(0) + "out/secret", c.up(0) + "out")


def shape_deep(c):
    links(c, "a/b/c", c.up(3) + "out/secret", c.up(3) + "out")
    os.symlink("a/b/c/l", c.at("l"))
    os.symlink("a/b/c/d", c.at("d"))


def shape_up_after_name(c):
    os.makedirs(c.at("a/b"))
    links(c, ".", "a/b/../../" + c.up(0) + "out/secret", "a/../" + c.up(0) + "out")


def shape_slashes(c):
    links(
        c, ".", ".//.//" + c.up(0).replace("/", "//") + "./out///secret", "./" + c.up(0) + "out//./"
    )


def shape_far_up(c):
    links(c, ".", "../" * 60 + c.out[1:] + "/secret", "../" * 60 + c.out[1:])


def shape_very_long(c):
    fill = "./" * 1950
    links(c, ".", (fill + c.up(0) + "out/secret")[-4095:], (fill + c.up(0) + "out")[-4095:])


def shape_chain(c):
    os.symlink(c.up(0) + "out", c.at("x0"))
    for n in range(20):
        os.symlink(f"x{n}", c.at(f"x{n + 1}"))
    os.symlink("x20/secret", c.at("l"))
    os.symlink("x20", c.at("d"))


def shape_parent_link(c):
    os.symlink("..", c.at("p"))
    os.symlink("p/../out/secret", c.at("l"))
    os.symlink("p/../out", c.at("d"))


def shape_tree_path(c):
    links(c, ".", c.tree + "/../out/secret", c.tree + "/../out")


def shape_tree_path_twice(c):
    links(c, ".", c.tree + "/" + c.name + "/../../out/secret", c.tree + "/" + c.name + "/../../out")


def shape_base_path(c):
    links(c, ".", c.base + "/../out/secret", c.base + "/../out")


def shape_proc_root(c):
    links(c, ".", "/proc/self/root" + c.out + "/secret", "/proc/self/root" + c.out)


def shape_proc_cwd(c):
    links(c, ".", "/proc/self/cwd/" + c.up(0) + "out/secret", "/proc/self/cwd/" + c.up(0) + "out")


def shape_dev_fd(c):
    links(c, ".", "/dev/fd/../root" + c.out + "/secret", "/dev/fd/../root" + c.out)


def shape_hard_link(c):
    os.makedirs(c.at("a/b/c"))
    for name, to in (("l", "../out/secret"), ("d", "../out")):
        os.symlink("../" + to, c.at("a/" + name))
        os.link(c.at("a/" + name), c.at("a/b/c/" + name), follow_symlinks=False)
        # From a deeper directory it would stay in the tree.
        os.rename(c.at("a/" + name), c.at(name))


def shape_renamed(c):
    os.makedirs(c.at("a/b"))
    os.symlink(c.up(0) + "out/secret", c.at("a/b/l"))
    os.symlink(c.up(0) + "out", c.at("a/b/d"))
    # In a/b they lead to names of the tree; in the row's directory, out.
    os.rename(c.at("a/b/l"), c.at("l"))
    os.rename(c.at("a/b/d"), c.at("d"))


def shape_renamed_dir(c):
    os.makedirs(c.at("a/b"))
    os.symlink("../" * 3 + "out/secret", c.at("a/b/l"))
    os.symlink("../" * 3 + "out", c.at("a/b/d"))
    os.rename(c.at("a/b"), c.at("b"))
    os.symlink("b/l", c.at("l"))
    os.symlink("b/d", c.at("d"))


def shape_bytes(c):
    os.mkdir(os.fsencode(c.dir) + b"/\xff\xfe\n")
    os.symlink(b"\xff\xfe\n/../" + c.up(0).encode() + b"out/secret", c.at("l"))
    os.symlink(b"\xff\xfe\n/../" + c.up(0).encode() + b"out", c.at("d"))


def shape_into_link(c):
    """Through a directory link that stays inside, to one that does not."""
    os.makedirs(c.at("a/b"))
    os.symlink("a/b", c.at("in"))
    os.symlink("../" + "../../../out", c.at("a/b/o"))
    os.symlink("in/o/secret", c.at("l"))
    os.symlink("in/o", c.at("d"))


SHAPES = {
    name[len("shape_") :]: shape
    for name, shape in list(globals().items())
    if name.startswith("shape_")
}
# Links that lead out while they are in the base. On a plain directory the base's own path is the
# tree's.
for name, shape in SHAPES.items():
    for old in (False, True):
        age = "old" if old else "new"
        add("ESCAPE", f"read-through-{name}-{age}", shape, lambda c: read(c.at("l")), old)
        add("ESCAPE", f"stat-in-{name}-{age}", shape, lambda c: inode_text(c.at("d/secret")), old)
    add(
        "ESCAPE",
        f"create-in-{name}",
        shape,
        lambda c: write(c.at("d/created"), os.O_CREAT | os.O_WRONLY),
        True,
    )


# Actions through a link to a file (l) or a directory (d) outside.


def exec_(path, *words):
    done = subprocess.run([path, *words], capture_output=True, timeout=20)
    return done.stdout + done.stderr


def mapped(c):
    fd = os.open(c.at("l"), os.O_RDONLY)
    return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)[:100]


def chdir_and(c, act):
    old = os.getcwd()
    os.chdir(c.at("d"))
    try:
        return act()
    finally:
        os.chdir(old)


def connect(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(5)
        s.connect(path)
        return s.recv(100)


def bind(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path)


def script(c):
    with open(c.at("s"), "w") as file:
        file.write("#!" + c.at("d/tool") + "\n")
    os.chmod(c.at("s"), 0o755)
    return exec_(c.at("s"))


def openat2(dirfd, path, resolve=0, flags=os.O_RDONLY):
    how = struct.pack("<QQQ", flags, 0, resolve)
    return check(libc.syscall(437, dirfd, path.encode(), how, len(how)))


def fd_of(fd):
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def inotify(path):
    fd = check(libc.inotify_init1(os.O_NONBLOCK))
    check(libc.inotify_add_watch(fd, path.encode(), 0xFFF))
    os.close(fd)
    return REVEALED


def name_to_handle(path):
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    check(libc.name_to_handle_at(AT_FDCWD, path.encode(), handle, ctypes.byref(mount_id), 0x400))
    return f"handle, mount {mount_id.value}" if mount_id.value else REVEALED


def statfs(path):
    return REVEALED if os.statvfs(path) else ""


def readdir_links(c):
    return [e.name for e in os.scandir(c.at("d"))]


def absent(c):
    """Tells whether the attacker can distinguish an absent name outside from a present one."""
    there, not_there = (_errno(lambda: os.stat(c.at("d/" + name))) for name in ("secret", "absent"))
    return REVEALED if not_there == errno.ENOENT and there != errno.ENOENT else "no"


OPS = {
    "read": lambda c: read(c.at("l")),
    "read-dir-link": lambda c: read(c.at("d/secret")),
    "mmap": mapped,
    "append": lambda c: write(c.at("l"), os.O_WRONLY | os.O_APPEND),
    "overwrite": lambda c: write(c.at("l")),
    "truncate-open": lambda c: os.close(os.open(c.at("l"), os.O_WRONLY | os.O_TRUNC)),
    "truncate": lambda c: os.truncate(c.at("l"), 3),
    "stat": lambda c: inode_text(c.at("l")),
    "lstat-inside-dir": lambda c: f"ino:{os.lstat(c.at('d/secret')).st_ino};",
    "access": lambda c: REVEALED if os.access(c.at("l"), os.F_OK) else "no",
    "exists": lambda c: REVEALED if os.path.exists(c.at("d/secret")) else "no",
    "absent": absent,
    "list": readdir_links,
    "scandir-slash": lambda c: os.listdir(c.at("d/.")),
    "chdir": lambda c: chdir_and(c, lambda: read("secret")),
    "chdir-getcwd": lambda c: chdir_and(
        c, lambda: "dir:" + os.getcwd() + (REVEALED if os.getcwd() == c.out else "")
    ),
    "statvfs": lambda c: statfs(c.at("d")),
    "create": lambda c: write(c.at("d/created"), os.O_CREAT | os.O_WRONLY),
    "create-exclusive": lambda c: write(c.at("d/created"), os.O_CREAT | os.O_EXCL | os.O_WRONLY),
    "create-by-dangling": lambda c: write(c.at("g"), os.O_CREAT | os.O_WRONLY),
    "tmpfile": lambda c: REVEALED if os.open(c.at("d"), os.O_TMPFILE | os.O_WRONLY) else "",
    "mkdir": lambda c: os.mkdir(c.at("d/created")),
    "mkfifo": lambda c: os.mkfifo(c.at("d/created")),
    "mknod": lambda c: os.mknod(c.at("d/created"), 0o100644),
    "symlink-into": lambda c: os.symlink("x", c.at("d/created")),
    "unlink": lambda c: os.unlink(c.at("d/secret")),
    "rmdir": lambda c: os.rmdir(c.at("d/empty")),
    "rename-within": lambda c: os.rename(c.at("d/secret"), c.at("d/moved")),
    "rename-out": lambda c: os.rename(c.at("mine"), c.at("d/moved")),
    "rename-in": lambda c: os.rename(c.at("d/secret"), c.at("taken")),
    "rename-over": lambda c: os.rename(c.at("mine"), c.at("d/secret")),
    "hard-link-in": lambda c: os.link(c.at("d/secret"), c.at("taken")),
    "hard-link-follow": lambda c: check(
        libc.linkat(AT_FDCWD, c.at("l").encode(), AT_FDCWD, c.at("taken").encode(), 0x400)
    ),
    "hard-link-out": lambda c: os.link(c.at("mine"), c.at("d/moved")),
    "chmod": lambda c: os.chmod(c.at("l"), 0o600),
    "utime": lambda c: os.utime(c.at("l"), (1, 1)),
    "setxattr": lambda c: os.setxattr(c.at("l"), "user.attacked", b"1"),
    "getxattr": lambda c: os.getxattr(c.at("l"), "user.mark"),
    "listxattr": lambda c: REVEALED if "user.mark" in os.listxattr(c.at("l")) else "",
    "readlink-through": lambda c: os.readlink(c.at("d/link")),
    "exec": lambda c: exec_(c.at("d/tool")),
    "exec-shell": lambda c: exec_("/bin/sh", c.at("d/tool")),
    "interpreter": script,
    "fexecve": lambda c: exec_(f"/proc/{os.getpid()}/fd/{os.open(c.at('d/tool'), os.O_PATH)}"),
    "connect": lambda c: connect(c.at("d/socket")),
    "bind": lambda c: bind(c.at("d/bound")),
    "open-path-then-read": lambda c: read(f"/proc/self/fd/{os.open(c.at('l'), os.O_PATH)}"),
    "open-path-stat": lambda c: f"ino:{os.fstat(os.open(c.at('l'), os.O_PATH)).st_ino};",
    "openat-of-dir": lambda c: fd_of(
        os.open("secret", os.O_RDONLY, dir_fd=os.open(c.at("d"), os.O_RDONLY))
    ),
    "openat-of-path-dir": lambda c: fd_of(
        os.open("secret", os.O_RDONLY, dir_fd=os.open(c.at("d"), os.O_PATH))
    ),
    "openat2": lambda c: fd_of(openat2(AT_FDCWD, c.at("l"))),
    "openat2-no-magic": lambda c: fd_of(openat2(AT_FDCWD, c.at("d/secret"), 2)),
    "fchdir": lambda c: _fchdir(os.open(c.at("d"), os.O_PATH), lambda: read("secret")),
    "inotify": lambda c: inotify(c.at("l")),
    "name-to-handle": lambda c: name_to_handle(c.at("l")) and REVEALED,
    "sendfile-out": lambda c: os.sendfile(
        os.open(c.at("l"), os.O_WRONLY), os.open(c.at("mine"), os.O_RDONLY), 0, 4
    ),
    "copy-range": lambda c: os.copy_file_range(
        os.open(c.at("mine"), os.O_RDONLY), os.open(c.at("l"), os.O_WRONLY), 4
    ),
    "flock": lambda c: fcntl.flock(os.open(c.at("l"), os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    or REVEALED,
    "cat": lambda c: exec_("/bin/cat", c.at("l")),
    "cp-follow": lambda c: exec_("/bin/cp", "-L", c.at("l"), c.at("copied")) + read(c.at("copied")),
    "tar-follow": lambda c: exec_("/bin/tar", "-chf", "-", "-C", c.dir, "l"),
    "find-follow": lambda c: exec_("/usr/bin/find", "-L", c.at("d"), "-name", "outside-*"),
    "shell-redirect": lambda c: exec_("/bin/sh", "-c", f"echo attacked > '{c.at('l')}'"),
    "realpath-e": lambda c: exec_("/usr/bin/realpath", "-e", c.at("d/link"))
    and exec_("/usr/bin/stat", "-Lc", "ino:%i;", c.at("l")),
}


def _or_none(act):
    """Returns the result, or None if the call fails because a process or descriptor is gone."""
    try:
        return act()
    except OSError:
        return None


def _errno(act):
    try:
        act()
    except OSError as error:
        return error.errno
    return 0


def _fchdir(fd, act):
    old = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    os.fchdir(fd)
    try:
        return act()
    finally:
        os.fchdir(old)


def setup_for_ops(c):
    shape_relative(c)
    os.symlink(c.up(0) + "out/created", c.at("g"))
    with open(c.at("mine"), "w") as file:
        file.write("mine")


ONE_DISK = {
    "rename-out",
    "rename-in",
    "rename-over",
    "hard-link-in",
    "hard-link-follow",
    "hard-link-out",
    "copy-range",
}
for name, act in OPS.items():
    add("ESCAPE", f"op-{name}", setup_for_ops, act, one_disk=name in ONE_DISK)


# Attacks that need no link, or several steps.


def standing_dir_moves_up(c):
    """A link that was good is no more when its directory was moved up."""
    os.makedirs(c.at("a/b"))
    os.makedirs(c.tree + "/out", exist_ok=True)
    write(c.tree + "/out/secret", os.O_CREAT | os.O_WRONLY, b"inside")
    os.symlink("../../../out/secret", c.at("a/b/l"))
    assert read(c.at("a/b/l")) == b"inside"
    os.rename(c.at("a/b"), c.at("b"))
    return read(c.at("b/l"))


def mv_command(c):
    os.makedirs(c.at("a/b"))
    os.symlink("../../../out/secret", c.at("a/b/l"))
    exec_("/bin/cat", c.at("a/b/l"))
    exec_("/bin/mv", c.at("a/b"), c.at("b"))
    return read(c.at("b/l"))


def exchange(a, b):
    check(libc.renameat2(AT_FDCWD, a.encode(), AT_FDCWD, b.encode(), 2))


def exchanged_levels(c):
    os.makedirs(c.at("a/b"))
    os.mkdir(c.at("e"))
    os.symlink("../../../out/secret", c.at("a/b/l"))
    _errno(lambda: read(c.at("a/b/l")))
    exchange(c.at("a/b"), c.at("e"))
    return read(c.at("e/l"))


def link_by_link(c):
    """A link that is moved up by itself, after it was read where it is good."""
    os.makedirs(c.at("a/b"))
    os.symlink("../../../out/secret", c.at("a/b/l"))
    _errno(lambda: read(c.at("a/b/l")))
    os.rename(c.at("a/b/l"), c.at("a/l"))
    return read(c.at("a/l"))


def linked_up(c):
    os.makedirs(c.at("a/b"))
    os.symlink("../../../out/secret", c.at("a/b/l"))
    _errno(lambda: read(c.at("a/b/l")))
    os.link(c.at("a/b/l"), c.at("a/l"), follow_symlinks=False)
    return read(c.at("a/l"))


def swapped_middle(c):
    os.makedirs(c.at("a/b/c"))
    os.symlink("b/c/../../../out/secret", c.at("a/l"))
    _errno(lambda: read(c.at("a/l")))
    os.rename(c.at("a/b/c"), c.at("gone"))
    os.symlink("..", c.at("a/b/c"))
    return read(c.at("a/l"))


def readlink_and_walk(c):
    """Follows a link by hand, as some programs do."""
    shape_relative(c)
    path = os.path.normpath(os.path.join(c.dir, os.readlink(c.at("l"))))
    return read(path)


def setuid_program(c):
    return as_ordinary_user(lambda: REVEALED if exec_(c.at("suid"), "-u").strip() == b"0" else "no")


def as_ordinary_user(act):
    """Runs `act` in a child process of an ordinary user and returns its output."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            said = act()
            os.write(into, said if isinstance(said, bytes) else str(said).encode())
            os._exit(0)
        except BaseException as error:
            os.write(into, repr(error).encode())
            os._exit(1)
    os.close(into)
    said = b""
    while chunk := os.read(out, 1000):
        said += chunk
    os.close(out)
    os.waitpid(child, 0)
    return said


def setup_setuid(c):
    exec_("/bin/cp", "/usr/bin/id", c.at("suid"))
    os.chmod(c.at("suid"), 0o4755)


def setup_capability(c):
    exec_("/bin/cp", "/bin/cat", c.at("able"))
    # cap_dac_read_search, effective: vfs_cap_data of version 2
    os.setxattr(
        c.at("able"), "security.capability", struct.pack("<5I", 0x02000001, 1 << 2, 0, 0, 0)
    )


def file_capability(c):
    return as_ordinary_user(lambda: exec_(c.at("able"), c.out + "/private"))


def setup_device(c):
    os.mknod(c.at("zero"), 0o20666, os.makedev(1, 5))


def open_device(c):
    return REVEALED if os.read(os.open(c.at("zero"), os.O_RDONLY), 4) == bytes(4) else ""


def handle_of(c):
    """open_by_handle_at of the tree's own root, with the number of a file outside."""
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    check(
        libc.name_to_handle_at(
            AT_FDCWD, (c.out + "/secret").encode(), handle, ctypes.byref(mount_id), 0
        )
    )
    root = os.open(c.tree, os.O_RDONLY)
    return fd_of(check(libc.open_by_handle_at(root, handle, os.O_RDONLY)))


def deleted_cwd(c):
    """`..` of a directory that is gone."""
    os.makedirs(c.at("a/b"))

    def act():
        os.rmdir(c.at("a/b"))
        os.rmdir(c.at("a"))
        return read("../../" + c.up(0) + "out/secret")

    return _fchdir(os.open(c.at("a/b"), os.O_RDONLY), act)


def fd_magic_dots(c):
    os.mkdir(c.at("x"))
    return read(f"/proc/self/fd/{os.open(c.at('x'), os.O_PATH)}/../../../out/secret")


for name, act in {
    "directory-of-a-link-moves-up": standing_dir_moves_up,
    "mv-of-a-directory-with-a-link": mv_command,
    "directories-exchanged-across-levels": exchanged_levels,
    "link-moved-up-by-itself": link_by_link,
    "link-hard-linked-further-up": linked_up,
    "name-after-which-it-climbs-is-swapped": swapped_middle,
    "readlink-and-walk-by-hand": readlink_and_walk,
}.items():
    add("ESCAPE", name, lambda c: None, act)
add("ESCAPE", "setuid-program-of-the-base", setup_setuid, setuid_program, True, root_only=True)
add("ESCAPE", "setuid-program-made-inside", setup_setuid, setuid_program, False, root_only=True)
add(
    "ESCAPE", "file-capability-of-the-base", setup_capability, file_capability, True, root_only=True
)
add(
    "ESCAPE",
    "file-capability-made-inside",
    setup_capability,
    file_capability,
    False,
    root_only=True,
)
add("ESCAPE", "device-node-of-the-base", setup_device, open_device, True, root_only=True)
add("ESCAPE", "device-node-made-inside", setup_device, open_device, False, root_only=True)
add("ESCAPE", "open-by-handle", lambda c: None, handle_of, root_only=True, one_disk=True)


# Operations that must still work: a mount is no wall inside itself.


def inside(c):
    os.makedirs(c.at("a/b/c"))
    write(c.at("f"), os.O_CREAT | os.O_WRONLY, b"inside")
    write(c.at("a/b/f"), os.O_CREAT | os.O_WRONLY, b"deeper")


def works(name, text, at, act=None):
    def setup(c):
        inside(c)
        os.symlink(text(c) if callable(text) else text, c.at(at))

    for old in (False, True):
        age = "old" if old else "new"
        add("WORKS", f"works-{name}-{age}", setup, act or (lambda c: read(c.at(at))), old)


works("plain", "f", "l")
works("down", "a/b/f", "l")
works("up", "../../f", "a/b/l")
works("up-to-the-root", lambda c: "../" * 3 + c.name + "/f", "a/b/l")
works("up-after-name", "b/c/../../../f", "a/l")
works("absolute-in-the-tree", lambda c: c.tree + "/" + c.name + "/f", "l")
works("absolute-in-the-base", lambda c: c.base + "/" + c.name + "/f", "l")
works(
    "absolute-with-dots",
    lambda c: c.tree + "/../" + os.path.basename(c.tree) + "/" + c.name + "/f",
    "l",
)
works("directory", "a/b", "l", lambda c: read(c.at("l/f")))
works("directory-slash", "a/b/", "l", lambda c: sorted(os.listdir(c.at("l"))))
works("slashes", ".//a///b/./f", "l")
works(
    "create-through",
    "a/b/new",
    "l",
    lambda c: (write(c.at("l"), os.O_CREAT | os.O_WRONLY), read(c.at("a/b/new"))),
)
works("loop", "l", "l", lambda c: errno.errorcode[_errno(lambda: read(c.at("l")))])
works("dangling", "nowhere/at/all", "l", lambda c: errno.errorcode[_errno(lambda: read(c.at("l")))])
works(
    "dangling-up", "nowhere/../f", "l", lambda c: errno.errorcode[_errno(lambda: read(c.at("l")))]
)
works("not-a-directory", "f/../f", "l", lambda c: errno.errorcode[_errno(lambda: read(c.at("l")))])
works("readlink", "../f", "a/l", lambda c: os.readlink(c.at("a/l")))
works("unlink-only-the-link", "f", "l", lambda c: (os.unlink(c.at("l")), read(c.at("f"))))
works("longest", "./" * 2047 + "f", "l")
works("lstat-of-a-way-out", "/etc/passwd", "l", lambda c: stat.S_ISLNK(os.lstat(c.at("l")).st_mode))
works("remove-a-way-out", "/etc/passwd", "l", lambda c: os.unlink(c.at("l")))
works(
    "move-a-link-down",
    "../../f",
    "a/b/l",
    lambda c: (
        read(c.at("a/b/l")),
        os.rename(c.at("a/b/l"), c.at("a/b/c/l")),
        errno.errorcode[_errno(lambda: read(c.at("a/b/c/l")))],
    ),
)
works(
    "link-that-becomes-good",
    "../../f",
    "l",
    lambda c: (
        _errno(lambda: read(c.at("l"))) != 0,
        os.rename(c.at("l"), c.at("a/b/l")),
        read(c.at("a/b/l")),
    ),
)
works(
    "directory-that-becomes-good",
    lambda c: "../f",
    "a/l",
    lambda c: (
        os.mkdir(c.at("z")),
        os.rename(c.at("a"), c.at("z/a")),
        errno.errorcode[_errno(lambda: read(c.at("z/a/l")))],
        os.rename(c.at("z/a"), c.at("a")),
        read(c.at("a/l")),
    ),
)
works(
    "names-that-look-odd",
    "..a/...",
    "l",
    lambda c: (
        os.mkdir(c.at("..a")),
        write(c.at("..a/..."), os.O_CREAT | os.O_WRONLY, b"odd"),
        read(c.at("l")),
    ),
)


# Attacks that a mount cannot stop: the process does not go through the tree.


def chroot_out(c):
    os.chroot("/proc/self/root")
    return read(c.out + "/secret")


def bind_mount(c):
    check(libc.unshare(0x00020000))
    check(libc.mount(c.out.encode(), c.at("m").encode(), None, 4096, None))
    return read(c.at("m/secret"))


def new_namespace(c):
    check(libc.unshare(0x10000000 | 0x00020000))
    check(libc.mount(c.out.encode(), c.at("m").encode(), None, 4096, None))
    return read(c.at("m/secret"))


def in_child(act):
    return lambda c: as_child(lambda: act(c))


def as_child(act):
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = act()
            os.write(into, said if isinstance(said, bytes) else str(said).encode())
        except BaseException as error:
            os.write(into, repr(error).encode())
        os._exit(0)
    os.close(into)
    said = b""
    while chunk := os.read(out, 1000):
        said += chunk
    os.close(out)
    os.waitpid(child, 0)
    return said


def descriptor_of_another(c):
    """The watcher holds the directory outside open, and is our parent or its parent."""
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        for fd in _or_none(lambda: os.listdir(f"/proc/{pid}/fd")) or []:
            if _or_none(lambda: os.readlink(f"/proc/{pid}/fd/{fd}")) == c.out:
                return read(f"/proc/{pid}/fd/{fd}/secret")
    raise OSError(errno.ENOENT, "no process holds it open")


PROCESS = {
    "absolute-path": (lambda c: read(c.out + "/secret")),
    "dots-above-the-tree": (lambda c: read(c.at("../../out/secret"))),
    "chdir-above-the-tree": (
        lambda c: _fchdir(os.open(c.at("../.."), os.O_PATH), lambda: read("out/secret"))
    ),
    "proc-self-root": (lambda c: read("/proc/self/root" + c.out + "/secret")),
    "proc-self-cwd": (
        lambda c: _fchdir(
            os.open(c.dir, os.O_PATH), lambda: read("/proc/self/cwd/../../out/secret")
        )
    ),
    "proc-of-the-parent": (lambda c: read(f"/proc/{os.getppid()}/root{c.out}/secret")),
    "dots-of-a-descriptor": fd_magic_dots,
    "dots-of-a-removed-directory": deleted_cwd,
    "descriptor-of-another-process": descriptor_of_another,
    "write-outside": (lambda c: write(c.out + "/secret")),
    "create-outside": (lambda c: write(c.out + "/created", os.O_CREAT | os.O_WRONLY)),
    "socket-outside": (lambda c: connect(c.out + "/socket")),
    "list-above": (lambda c: os.listdir(c.at("../../out"))),
    "chroot": in_child(chroot_out),
    "bind-mount-in-own-namespace": in_child(bind_mount),
    "user-namespace": in_child(new_namespace),
}
ROOT_ONLY = {
    "chroot",
    "bind-mount-in-own-namespace",
    "descriptor-of-another-process",
    "proc-of-the-parent",
}
for name, act in PROCESS.items():
    add(
        "PROCESS",
        f"process-{name}",
        lambda c: os.mkdir(c.at("m")),
        act,
        root_only=name in ROOT_ONLY,
    )


# Attacks on a checkpoint in the mount: on its content, and through its links on the outside and the
# live tree.


def checkpoint(c):
    """A checkpoint of the tree as it is, made by mkdir; where the row's own directory is in it."""
    top = f"{c.tree}/.jailfs/checkpoints/{c.name}"
    os.mkdir(top)
    return f"{top}/{c.name}"


def refused(act, *wanted):
    code = errno.errorcode.get(_errno(act), "nothing")
    assert code in wanted, f"{code} and not {wanted}"
    return "refused"


def add_checkpoint(name, setup, act, root_only=False):
    add("CHECKPOINT", f"checkpoint-{name}", setup, act, root_only=root_only)


def checkpoint_link(shape, levels):
    def setup(c):
        # The same texts, and those that would be right from so many levels further down.
        up = c.up
        c.up = lambda depth: up(depth + levels)
        shape(c)

    def act(c):
        where = checkpoint(c)
        for name in ("l", "d/secret", "d/outside", "d/."):
            code = _errno(
                lambda: read(f"{where}/{name}") if name != "d/." else os.listdir(f"{where}/{name}")
            )
            assert code in (errno.EXDEV, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR), (
                name,
                code,
            )
        for name in ("l", "d/created"):
            assert _errno(lambda: write(f"{where}/{name}", os.O_WRONLY | os.O_CREAT)) != 0
        return "refused"

    return setup, act


for name, shape in SHAPES.items():
    for levels in (0, 3):
        # The depth of a name matters only to shapes that count levels; the others are the same at
        # each depth.
        if levels == 0 or name in (
            "relative",
            "deep",
            "up_after_name",
            "chain",
            "into_link",
            "slashes",
        ):
            add_checkpoint(f"link-{name}-{levels}", *checkpoint_link(shape, levels))


def checkpoint_setup(c):
    write(c.at("f"), os.O_CREAT | os.O_WRONLY, b"as it was")
    os.mkdir(c.at("e"))
    os.symlink("f", c.at("in"))
    os.symlink(c.tree + "/" + c.name + "/f", c.at("by-path"))


def mapped_write(path):
    """Writes into a mapping of a checkpoint. The daemon discards the page at the flush."""
    fd = os.open(path, os.O_RDWR)
    m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    m[0:4] = b"evil"
    m.close()
    os.close(fd)
    end = time.monotonic() + 20
    while read(path) != b"as it was":
        assert time.monotonic() < end
    return "refused"


CHECKPOINT = {
    "write": lambda c, w: refused(lambda: write(w + "/f"), "EROFS"),
    "append": lambda c, w: refused(lambda: write(w + "/f", os.O_WRONLY | os.O_APPEND), "EROFS"),
    "write-by-link": lambda c, w: refused(lambda: write(w + "/in"), "EROFS"),
    "write-by-absolute-link": lambda c, w: refused(lambda: write(w + "/by-path"), "EROFS"),
    "write-by-a-link-of-the-live-tree": lambda c, w: (
        os.symlink(w + "/f", c.at("to-checkpoint")),
        refused(lambda: write(c.at("to-checkpoint")), "EROFS"),
    )[1],
    "mapped-write": lambda c, w: mapped_write(w + "/f"),
    "truncate": lambda c, w: refused(lambda: os.truncate(w + "/f", 1), "EROFS"),
    "truncate-open": lambda c, w: refused(
        lambda: os.open(w + "/f", os.O_WRONLY | os.O_TRUNC), "EROFS"
    ),
    "allocate": lambda c, w: refused(
        lambda: os.posix_fallocate(os.open(w + "/f", os.O_WRONLY), 0, 99), "EROFS"
    ),
    "copy-range": lambda c, w: refused(
        lambda: os.copy_file_range(
            os.open(c.at("f"), os.O_RDONLY), os.open(w + "/f", os.O_WRONLY), 4
        ),
        "EROFS",
    ),
    "create": lambda c, w: refused(lambda: write(w + "/new", os.O_CREAT | os.O_WRONLY), "EROFS"),
    "create-by-dangling": lambda c, w: (
        os.symlink(w + "/new", c.at("g")),
        refused(lambda: write(c.at("g"), os.O_CREAT | os.O_WRONLY), "EROFS"),
    )[1],
    "tmpfile": lambda c, w: refused(lambda: os.open(w, os.O_TMPFILE | os.O_WRONLY), "EROFS"),
    "mkdir": lambda c, w: refused(lambda: os.mkdir(w + "/new"), "EROFS"),
    "mkfifo": lambda c, w: refused(lambda: os.mkfifo(w + "/new"), "EROFS"),
    "symlink": lambda c, w: refused(lambda: os.symlink("/", w + "/new"), "EROFS"),
    "bind": lambda c, w: _fchdir(
        os.open(w, os.O_PATH), lambda: refused(lambda: bind("new"), "EROFS")
    ),
    "unlink": lambda c, w: refused(lambda: os.unlink(w + "/f"), "EROFS"),
    "rmdir": lambda c, w: refused(lambda: os.rmdir(w + "/e"), "EROFS"),
    "rmdir-of-the-checkpoint": lambda c, w: refused(lambda: os.rmdir(os.path.dirname(w)), "EPERM"),
    "rmdir-of-the-directory": lambda c, w: refused(lambda: os.rmdir(c.tree + "/.jailfs"), "EROFS"),
    "rename-in": lambda c, w: refused(lambda: os.rename(c.at("f"), w + "/new"), "EROFS"),
    "rename-out": lambda c, w: refused(lambda: os.rename(w + "/f", c.at("taken")), "EROFS"),
    "rename-within": lambda c, w: refused(lambda: os.rename(w + "/f", w + "/g"), "EROFS"),
    "rename-exchange": lambda c, w: refused(lambda: exchange(c.at("f"), w + "/f"), "EROFS"),
    "rename-of-the-checkpoint": lambda c, w: refused(
        lambda: os.rename(os.path.dirname(w), os.path.dirname(w) + "-moved"), "EROFS"
    ),
    "rename-over-the-directory": lambda c, w: refused(
        lambda: os.rename(c.at("e"), c.tree + "/.jailfs"), "EROFS"
    ),
    "rename-of-the-directory": lambda c, w: refused(
        lambda: os.rename(c.tree + "/.jailfs", c.tree + "/mine"), "EROFS"
    ),
    "link-in": lambda c, w: refused(lambda: os.link(c.at("f"), w + "/new"), "EROFS"),
    "link-out": lambda c, w: refused(lambda: os.link(w + "/f", c.at("taken")), "EROFS"),
    "link-out-by-descriptor": lambda c, w: refused(
        lambda: check(
            libc.linkat(
                AT_FDCWD,
                f"/proc/self/fd/{os.open(w + '/f', os.O_RDONLY)}".encode(),
                AT_FDCWD,
                c.at("taken").encode(),
                0x400,
            )
        ),
        "EROFS",
    ),
    "chmod": lambda c, w: refused(lambda: os.chmod(w + "/f", 0o777), "EROFS"),
    "chmod-of-the-checkpoints": lambda c, w: refused(
        lambda: os.chmod(c.tree + "/.jailfs/checkpoints", 0o777), "EROFS"
    ),
    "chown": lambda c, w: refused(lambda: os.chown(w + "/f", os.getuid(), os.getgid()), "EROFS"),
    "utime": lambda c, w: refused(lambda: os.utime(w + "/f", (1, 1)), "EROFS"),
    "setxattr": lambda c, w: refused(lambda: os.setxattr(w + "/f", "user.new", b"1"), "EROFS"),
    "removexattr": lambda c, w: refused(
        lambda: os.removexattr(w + "/f", "user.none"), "EROFS", "ENODATA"
    ),
    "origin-is-set": lambda c, w: refused(
        lambda: os.setxattr(c.at("f"), "user.jailfs.origin", b"base"), "EPERM"
    ),
    "text-is-written": lambda c, w: refused(
        lambda: write(c.tree + "/.jailfs/status"), "EROFS", "EACCES"
    ),
}
for name, act in CHECKPOINT.items():

    def whole(c, act=act):
        where = checkpoint(c)
        said = act(c, where)
        assert read(where + "/f") == b"as it was"
        return said

    add_checkpoint(name, checkpoint_setup, whole)


# The same on an entry of the edit history.


def history(c):
    """The directory with the edits of the row's file: one edit, the old content."""
    write(c.at("f"), os.O_WRONLY | os.O_TRUNC, b"as it is")
    return f"{c.tree}/.jailfs/history/{c.name}/f"


HISTORY = {
    "write": lambda c, w: refused(lambda: write(w + "/1"), "EROFS"),
    "mapped-write": lambda c, w: mapped_write(w + "/1"),
    "truncate": lambda c, w: refused(lambda: os.truncate(w + "/1", 1), "EROFS"),
    "create": lambda c, w: refused(
        lambda: write(w + "/2", os.O_CREAT | os.O_WRONLY), "EROFS", "EACCES"
    ),
    "unlink": lambda c, w: refused(lambda: os.unlink(w + "/1"), "EROFS", "EACCES"),
    "rename-out": lambda c, w: refused(
        lambda: os.rename(w + "/1", c.at("taken")), "EROFS", "EACCES"
    ),
    "rename-in": lambda c, w: refused(lambda: os.rename(c.at("f"), w + "/1"), "EROFS", "EACCES"),
    "link-out": lambda c, w: refused(lambda: os.link(w + "/1", c.at("taken")), "EROFS"),
    "chmod": lambda c, w: refused(lambda: os.chmod(w + "/1", 0o777), "EROFS"),
    "write-by-a-link-of-the-live-tree": lambda c, w: (
        os.symlink(w + "/1", c.at("to-checkpoint")),
        refused(lambda: write(c.at("to-checkpoint")), "EROFS"),
    )[1],
    "dots": lambda c, w: _fchdir(os.open(w, os.O_PATH), lambda: history_dots(c)),
    "a-link-has-no-edits": lambda c, w: history_links(c, w),
}


def history_dots(c):
    # One level above the tree is the directory above the mount, as from the tree's root.
    assert os.path.samefile("../../../..", c.tree) and os.path.samefile(
        "../../..", c.tree + "/.jailfs"
    )
    return "refused"


def history_links(c, where):
    """A link that replaces a file with edits, or a directory above it, leads nowhere."""
    os.unlink(c.at("f"))
    os.symlink(c.out + "/secret", c.at("f"))
    os.unlink(c.at("f"))
    assert sorted(os.listdir(where)) == ["1", "2"], os.listdir(where)
    os.mkdir(c.at("gone"))
    write(c.at("gone/secret"), os.O_CREAT | os.O_WRONLY, b"inside")
    os.unlink(c.at("gone/secret"))
    os.rmdir(c.at("gone"))
    os.symlink(c.out, c.at("gone"))
    above = os.path.dirname(where) + "/gone"
    assert os.listdir(above) == ["secret"] and os.listdir(above + "/secret") == ["1"]
    assert read(above + "/secret/1") == b"inside"
    return "refused"


for name, act in HISTORY.items():

    def whole(c, act=act):
        where = history(c)
        said = act(c, where)
        assert read(where + "/1") == b"as it was"
        return said

    add_checkpoint("edit-" + name, checkpoint_setup, whole)


def checkpoint_dots(c):
    where = checkpoint(c)
    same = lambda: os.path.samefile("../../../..", c.tree) and os.path.samefile(
        "../../..", c.tree + "/.jailfs"
    )
    assert _fchdir(os.open(where, os.O_PATH), same)
    return "refused"


def checkpoint_odd_names(c):
    top = os.fsencode(c.tree) + b"/.jailfs/checkpoints/"
    row = os.fsencode(c.name)
    good = [
        row + end
        for end in (b" ", b"-$(id)", b"\n\x1b[2J", b"\\", b";rm -rf .", "\u202e\u0000".encode()[:3])
    ]
    for name in good:
        os.mkdir(top + name)
        assert name in os.listdir(top) and os.path.isdir(top + name)
    for name, wanted in (
        (b"\xff", errno.EINVAL),
        (b"base", errno.EINVAL),
        (b"@-1", errno.EINVAL),
        (b"0", errno.EINVAL),
        (b"99999999999999999999", errno.EINVAL),
        (b"x" * 256, errno.ENAMETOOLONG),
        (b"..", errno.EEXIST),
        (b".", errno.EEXIST),
    ):
        assert _errno(lambda: os.mkdir(top + name)) == wanted, name
    assert _errno(lambda: os.mkdir(top + b"new/below")) in (errno.ENOENT, errno.EROFS)
    return "refused"


def checkpoint_live_tree(c):
    """A link of a checkpoint that names the live tree means its own."""
    write(c.at("f"), os.O_CREAT | os.O_WRONLY, b"then")
    for number, text in enumerate(
        (
            f"{c.tree}/{c.name}/f",
            f"{c.base}/{c.name}/f",
            "../../../../" + c.name + "/f",
            f"{c.tree}/.jailfs/../{c.name}/f",
        )
    ):
        os.symlink(text, c.at(f"l{number}"))
    where = checkpoint(c)
    os.unlink(c.at("f"))
    write(c.at("f"), os.O_CREAT | os.O_WRONLY, b"now")
    for number in range(4):
        said = _or_none(lambda: read(f"{where}/l{number}"))
        assert said in (None, b"then"), said
    return "refused"


add_checkpoint("dots", checkpoint_setup, checkpoint_dots)
add_checkpoint("odd-names", lambda c: None, checkpoint_odd_names)
add_checkpoint("link-into-the-live-tree", lambda c: None, checkpoint_live_tree)


def prepare(base, tree, out, whose):
    for row in ROWS.values():
        if row.old and whose in ("all", "root" if row.root_only else "user"):
            c = Ctx(base, base, tree, out, row)
            os.mkdir(c.dir)
            row.setup(c)


def attack(base, tree, out):
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        row = ROWS[json.loads(line)]
        c = Ctx(tree, base, tree, out, row)
        try:
            if not row.old:
                os.makedirs(c.dir, exist_ok=True)
                row.setup(c)
            os.chdir(c.dir)
            answer = ("done", repr(row.act(c)))
        except OSError as error:
            answer = ("error", errno.errorcode.get(error.errno, str(error)))
        except Exception as error:
            answer = ("odd", repr(error))
        # So that no process has its working directory in a mount that is to end.
        os.chdir("/")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "list":
        for row in ROWS.values():
            print(json.dumps([row.kind, row.name, row.root_only, row.one_disk]))
    elif sys.argv[1] == "prepare":
        prepare(*sys.argv[2:])
    else:
        attack(*sys.argv[2:])
