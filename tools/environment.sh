# Sourced by ./run and ./test: finds or makes the Python environment, and finds Bazel.
# shellcheck shell=bash
#
#   SPECIALIZED_DECODE_PYTHON  an interpreter to use as it is, instead of a virtual environment in .venv:
#                              for hosts that have torch with CUDA installed already

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

log() {
    printf '%s\n' "$*" >&2
}

fail() {
    log "error: $*"
    exit 1
}

# The password database's, where the caller, such as a CI runner, sets none.
if [ -z "${HOME:-}" ]; then
    HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
    export HOME
fi

# apt_install PACKAGE...: installs Debian packages, as root or through sudo.
apt_install() {
    local sudo=()
    command -v apt-get > /dev/null || fail "this machine has no apt-get; please install yourself: $*"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo > /dev/null || fail "not root and no sudo; please install: apt-get install $*"
        sudo=(sudo)
    fi
    log "installing $*"
    # A fresh image has no package lists.
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -q < /dev/null >&2
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" \
        < /dev/null >&2
}

# suits PYTHON: whether it is recent enough.
suits() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1
}

# find_base_python: prints a Python that can make virtual environments.
find_base_python() {
    local candidate
    for candidate in python3 /usr/bin/python3 python3.13 python3.12 python3.11; do
        if suits "$candidate" && "$candidate" -c 'import ensurepip, venv' > /dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    apt_install python3 python3-venv
    suits /usr/bin/python3 || fail "Python 3.11 or later is needed; this system's is $(/usr/bin/python3 --version)"
    echo /usr/bin/python3
}

# setup_python runtime|dev: sets `python` to an interpreter that has requirements/$1.txt.
setup_python() {
    local kind=$1 venv=$checkout/.venv wanted base stamp
    if [ -n "${SPECIALIZED_DECODE_PYTHON:-}" ]; then
        python=$SPECIALIZED_DECODE_PYTHON
        suits "$python" || fail "SPECIALIZED_DECODE_PYTHON=$python is not a Python 3.11 or later"
        python=$("$python" -c 'import sys; print(sys.executable)')
        local modules="torch numpy safetensors tokenizers click tqdm"
        [ "$kind" = runtime ] || modules+=" pytest"
        # shellcheck disable=SC2086
        "$python" - $modules <<'CHECK' || fail "SPECIALIZED_DECODE_PYTHON=$python cannot be used"
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"not installed in {sys.prefix}: {' '.join(missing)}")
CHECK
        return
    fi

    python=$venv/bin/python
    wanted=$(cat "$checkout"/requirements/*.txt | sha256sum)
    # One of several calls at a time; dev includes runtime.
    exec 9< "$checkout"
    flock 9
    if "$python" -c '' 2> /dev/null; then
        for stamp in "$venv/.dev" "$venv/.$kind"; do
            if [ "$(cat "$stamp" 2> /dev/null)" = "$wanted" ]; then
                exec 9<&-
                return
            fi
        done
    else
        base=$(find_base_python)
        log "making a virtual environment in .venv with $base"
        rm -rf "$venv"
        "$base" -m venv "$venv" || fail "$base -m venv does not work"
    fi
    log "installing requirements/$kind.txt into .venv"
    PIP_ROOT_USER_ACTION=ignore "$python" -m pip install --disable-pip-version-check --no-input --quiet \
        -r "$checkout/requirements/$kind.txt" < /dev/null >&2
    printf '%s\n' "$wanted" > "$venv/.$kind"
    exec 9<&-
}

# setup_bazel: sets the array `bazel` to a Bazel 7 that can load this repository; fails where there is none.
setup_bazel() {
    local candidate version
    for candidate in bazelisk bazel; do
        command -v "$candidate" > /dev/null || continue
        # bazelisk may have to download what .bazelversion asks for.
        version=$(cd "$checkout" && timeout 300 "$candidate" --version 2> /dev/null < /dev/null) || continue
        case $version in
            "bazel 7."*) ;;
            *)
                log "not using $candidate: it is $version, and Bazel 7 is needed"
                continue
                ;;
        esac
        if (cd "$checkout" && timeout 900 "$candidate" build --nobuild --noshow_progress \
            --repo_env=SPECIALIZED_DECODE_PYTHON="$python" //... > /dev/null 2>&1 < /dev/null); then
            bazel=("$candidate")
            return
        fi
        log "not using $candidate: it cannot load this repository here (no network?)"
    done
    log "using Debian's Bazel 7 in a root folder of its own, which the first call makes"
    SPECIALIZED_DECODE_PYTHON=$python "$checkout/tools/offline/bazel.sh" info release > /dev/null || return 1
    # shellcheck disable=SC2034
    bazel=("$checkout/tools/offline/bazel.sh")
}
