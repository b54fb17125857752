# Runs each line of its input as python (as JSON text). Prints whether it succeeded, and the value
# of an expression, or the name of the error.
import ctypes, errno, fcntl, json, mmap, os, stat, sys, time

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100


def linkat(old, new):
    if libc.linkat(AT_FDCWD, old.encode(), AT_FDCWD, new.encode(), 0x400):
        raise OSError(ctypes.get_errno(), "linkat")


def exchange(a, b):
    if libc.renameat2(AT_FDCWD, a.encode(), AT_FDCWD, b.encode(), 2):
        raise OSError(ctypes.get_errno(), "renameat2")


def write(path, data):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, data)
    os.close(fd)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def mapped(path, flags=os.O_RDWR):
    fd = os.open(path, flags)
    m = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    return m


scope = dict(globals())
for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            compiled = compile(code, "input", "eval")
        except SyntaxError:
            compiled = compile(code, "input", "exec")
        answer = (True, repr(eval(compiled, scope)))
    except OSError as error:
        answer = (False, errno.errorcode.get(error.errno, str(error)))
    except BaseException as error:
        answer = (False, repr(error))
    print(json.dumps(answer), flush=True)
