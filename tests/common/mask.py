# Runs a command in which openat2(2) fails, as the seccomp profiles of containers make it fail.
#
#   mask.py ENOSYS|EPERM CMD...
import ctypes, errno, os, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
NUMBER = 437  # openat2 has the same number everywhere
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ERRNO, ALLOW = 0x00050000, 0x7FFF0000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2

lines = [
    (LOAD, 0, 0, 0),
    (EQUAL, 0, 1, NUMBER),
    (RETURN, 0, 0, ERRNO | getattr(errno, sys.argv[1])),
    (RETURN, 0, 0, ALLOW),
]
program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in lines))
header = struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(program))
# Without it setuid programs, such as fusermount3, keep their privileges; only root may install it
# so.
if os.geteuid() != 0 and libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "no_new_privs")
if libc.prctl(PR_SET_SECCOMP, FILTER, header, 0, 0):
    raise OSError(ctypes.get_errno(), "seccomp")
os.execvp(sys.argv[2], sys.argv[2:])
