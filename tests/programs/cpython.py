# Runs modules of CPython's own test suite with the current directory as the place for their files,
# and prints a line for each test: its name and its outcome.
# Arguments: a path for the lines (outside of the tested directory) and the names of the modules.
# The modules' own file names begin with "@test_" in the current directory or come from TMPDIR, so
# both are in that directory.
import os, sys, tempfile, unittest

lines = open(sys.argv[1], "w")
place = os.getcwd()
assert tempfile.gettempdir() == place, f"TMPDIR is {tempfile.gettempdir()} and not {place}"
sys.path = [path for path in sys.path if path]


class Outcomes(unittest.TextTestResult):
    """Writes each outcome down when it is known, so that nothing is lost if the process dies."""

    def say(self, test, outcome):
        lines.write(f"{test.id()}\t{outcome}\n")
        lines.flush()

    def addSuccess(self, test):
        super().addSuccess(test)
        self.say(test, "passed")

    def addError(self, test, err):
        super().addError(test, err)
        self.say(test, f"error: {err[0].__name__}")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.say(test, "failed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.say(test, f"skipped: {reason}")

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.say(test, "failed as expected")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.say(test, "passed unexpectedly")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.say(subtest, f"failed: {err[0].__name__}")


suite = unittest.defaultTestLoader.loadTestsFromNames([f"test.{name}" for name in sys.argv[2:]])
unittest.TextTestRunner(resultclass=Outcomes, verbosity=2).run(suite)
left = sorted(os.listdir(place))
lines.write(f"the end\tleft behind: {left}\n")
