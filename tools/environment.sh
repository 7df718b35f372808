# Sourced by ./run and ./test: finds or makes the Python environment, and finds Bazel.
# shellcheck shell=bash
#
#   SPECIALIZED_DECODE_PYTHON  an interpreter to use as it is, instead of a virtual environment in .venv:
#                              for hosts that have torch with CUDA installed already
#   SPECIALIZED_DECODE_VLLM_PYTHON  the same for the environment that has vLLM, instead of .venv-vllm

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

# chosen_python VARIABLE MODULE...: prints the interpreter that the variable names, checked for its modules.
chosen_python() {
    local variable=$1 chosen=${!1}
    shift
    suits "$chosen" || fail "$variable=$chosen is not a Python 3.11 or later"
    "$chosen" - "$@" <<'CHECK' || fail "$variable=$chosen cannot be used"
import importlib.util, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"not installed in {sys.prefix}: {' '.join(missing)}")
print(sys.executable)
CHECK
}

# make_environment FOLDER KIND FILE...: a virtual environment with requirements/KIND.txt, made anew when the files that
# it follows from change.
make_environment() {
    local venv=$checkout/$1 kind=$2 wanted base stamp
    shift 2
    wanted=$(cd "$checkout/requirements" && cat "$@" | sha256sum)
    # One of several calls at a time; dev includes runtime.
    exec 9< "$checkout"
    flock 9
    if "$venv/bin/python" -c '' 2> /dev/null; then
        for stamp in "$venv/.dev" "$venv/.$kind"; do
            if [ "$(cat "$stamp" 2> /dev/null)" = "$wanted" ]; then
                exec 9<&-
                return
            fi
        done
    else
        base=$(find_base_python)
        log "making a virtual environment in ${venv##*/} with $base"
        rm -rf "$venv"
        "$base" -m venv "$venv" || fail "$base -m venv does not work"
    fi
    log "installing requirements/$kind.txt into ${venv##*/}"
    PIP_ROOT_USER_ACTION=ignore "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet \
        -r "$checkout/requirements/$kind.txt" < /dev/null >&2
    printf '%s\n' "$wanted" > "$venv/.$kind"
    exec 9<&-
}

# setup_python runtime|dev: sets `python` to an interpreter that has requirements/$1.txt.
setup_python() {
    local modules=(torch numpy safetensors tokenizers click tqdm)
    if [ -n "${SPECIALIZED_DECODE_PYTHON:-}" ]; then
        [ "$1" = runtime ] || modules+=(pytest)
        python=$(chosen_python SPECIALIZED_DECODE_PYTHON "${modules[@]}") || exit 1
    else
        make_environment .venv "$1" dev.txt runtime.txt
        python=$checkout/.venv/bin/python
    fi
}

# setup_vllm: sets `vllm_python` to an interpreter that has vLLM: `python` itself where it has it, as on a GPU host.
setup_vllm() {
    if [ -n "${SPECIALIZED_DECODE_VLLM_PYTHON:-}" ]; then
        vllm_python=$(chosen_python SPECIALIZED_DECODE_VLLM_PYTHON vllm pytest click) || exit 1
    elif "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; then
        vllm_python=$python
    else
        make_environment .venv-vllm vllm vllm.txt
        # shellcheck disable=SC2034
        vllm_python=$checkout/.venv-vllm/bin/python
    fi
    # The tests compile a stand-in for the driver's library, and Humming's weight kernels for the host.
    { command -v cc && command -v c++; } > /dev/null || apt_install g++ libc6-dev
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
