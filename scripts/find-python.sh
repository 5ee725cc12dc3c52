#!/bin/sh
# Print the path of a CPython that can make virtual environments.
#
#   scripts/find-python.sh [VERSION...]      e.g. scripts/find-python.sh 3.11 3.10
#
# The versions are tried in the order given; without any, every version that kvxfer supports is
# allowed.  A candidate counts only after it ran: a pyenv shim can be on PATH and refuse, and
# Debian's python3 can lack ensurepip.  Exit status 1 and a message on stderr when there is none.

set -u
supported="3.11 3.12 3.13 3.10"

# Prints the real executable when $1 is a usable CPython of version $2, else fails.
probe() {
    [ -x "$1" ] && "$1" - "$2" 2>/dev/null <<'PROGRAM'
import sys
import ensurepip, sysconfig, venv

version = "%d.%d" % sys.version_info[:2]
usable = (
    sys.implementation.name == "cpython"
    and version == sys.argv[1]
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
if usable:
    print(getattr(sys, "_base_executable", "") or sys.executable)
sys.exit(0 if usable else 1)
PROGRAM
}

# Candidate paths for version $1, best first.
candidates() {
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        printf '%s\n' "$folder/python$1"
    done
    for folder in $PATH; do
        printf '%s\n' "$folder/python3" "$folder/python"
    done
    IFS=$old_ifs
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python"; do
        [ -n "$root" ] || continue
        for path in "$root/versions/$1".*/bin/python "$root/cpython-$1".*/bin/python3; do
            printf '%s\n' "$path"
        done
    done
    printf '%s\n' "/usr/local/bin/python$1" "/usr/bin/python$1" "/opt/python$1/bin/python$1"
}

[ $# -gt 0 ] || set -- $supported
for version in "$@"; do
    found=$(candidates "$version" | while IFS= read -r path; do
        probe "$path" "$version" && break
    done)
    if [ -n "$found" ]; then
        printf '%s\n' "$found"
        exit 0
    fi
done

{
    printf 'kvxfer: found no usable CPython %s on this machine.\n' "$(echo "$*" | sed 's/ / or /g')"
    printf 'Looked on PATH, in pyenv and uv installations, and in /usr/local/bin and /usr/bin.\n'
    printf 'Install one, with its venv module, for example:\n'
    printf '  Debian, Ubuntu:  apt-get install python%s python%s-venv\n' "$1" "$1"
    printf '  Fedora:          dnf install python%s\n' "$1"
    printf '  pyenv:           pyenv install %s\n' "$1"
} >&2
exit 1
