# Runs one step of a program: bash step.sh PROGRAM.sh STEP. Every command must succeed.
set -euo pipefail
shopt -s inherit_errexit
export LC_ALL=C.UTF-8
# The command must fail. (`! command` does not end a script under `set -e`.)
fails() { ! "$@"; }
# After its files were written to another disk, a program must be told this.
moved() { :; }
# Processes that must not outlive a failed step.
failed() { :; }
. "$1"
trap 'test $? = 0 || { set +e; kill $(jobs -p); failed; } 2> /dev/null' EXIT
PS4='+ ${BASH_SOURCE##*/}:$LINENO: '
set -x
"$2"
