#!/usr/bin/env bash
# Makes .venv with everything nagara, its tests and its figures need. Run by make; may be repeated.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "setup: $*" >&2; }
fail() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }
can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    # Some packages bring a service. Tests start their own servers: nothing shall listen here.
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        # shellcheck disable=SC2064
        trap "rm -f $policy" EXIT
    fi
    # Somebody else's apt may be at work: wait for it.
    local install=(apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@")
    # The lists may be absent or too old to fetch anything with: read them only then.
    "${install[@]}" >/dev/null 2>&1 && return
    apt-get update -qq >/dev/null || true
    "${install[@]}" >/dev/null
}

install_debian_packages() {
    command -v dpkg-query >/dev/null || return 0
    local package missing=()
    for package in $(sed 's/#.*//' scripts/debian-packages.txt); do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
            missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return 0
    if can_install; then
        say "installing ${missing[*]}"
        apt_install "${missing[@]}" || say "could not install ${missing[*]}; going on without"
    else
        say "not installed (needs root and apt): ${missing[*]}"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found" "install one, or name it: make PYTHON=/path/to/python3"
}

require_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    local package
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if can_install; then
        say "installing $package"
        apt_install "$package" && "$1" -c 'import ensurepip, venv' 2>/dev/null && return
    fi
    fail "$1 cannot make virtual environments" "install the package $package"
}

install_debian_packages
python=$(find_python)
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    require_venv "$python"
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
say "installing Python packages into .venv (a minute or two the first time)"
# Byte code is compiled afterwards on all cores: pip does it on one.
.venv/bin/python -m pip install -q --no-compile -r scripts/requirements.txt
.venv/bin/python -m pip install -q --no-deps --no-build-isolation -e .
.venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib >/dev/null || true  # some ship templates
touch .venv/.ready
