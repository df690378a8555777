# The run.sh files source this script. It puts a Python that satisfies the given requirements files
# first on PATH.
#
#   source setup_env.sh REQUIREMENTS_FILE ...
#
# The script uses the active environment or, without .venv, any `python` on PATH (such as that of a
# container), if its packages are in the ranges of pyproject.toml. Otherwise, it creates .venv in the repository and installs the requirements there. It installs
# them again only if a requirement is not met. It uses uv if uv is installed. It does not need root
# access.

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_files=("$@")

_find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: No Python 3.10 to 3.14 was found. Install one (Debian, Ubuntu: apt-get install python3 python3-venv)." >&2
    return 2
}

# Without an NVIDIA GPU, install torch's CPU build: about 200 MB instead of 5 GB. If the index cannot be
# reached, the default build is installed. To use a mirror, set PYTORCH_CPU_INDEX to its URL; to get the
# default build without a GPU, for example on a login node, set it to none.
_cpu_index=${PYTORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

_wants_cpu_build() {
    ! { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1 || return 1
    "$1" -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)" \
        "$_cpu_index/torch/" 2>/dev/null
}

# In a terminal, show one changing line instead of hundreds. pip reports errors on stderr.
_one_line() {
    local line
    [ -t 2 ] || { cat >&2; return; }
    while IFS= read -r line; do
        case $line in *Collecting* | *Downloading* | *Building* | *Installing*)
            printf '\r\033[K  %.76s' "$line" >&2 ;;
        esac
    done
    printf '\r\033[K' >&2
}

_make_venv() {
    local python
    python=$(_find_python) || return 3
    echo "Setting up $_root/.venv. This happens once and takes a few minutes, mostly to download PyTorch ..." >&2
    local arguments=() file
    for file in "${_files[@]}"; do arguments+=(-r "$file"); done
    if _wants_cpu_build "$python"; then
        echo "No NVIDIA GPU found, so the CPU build of PyTorch is installed." >&2
        arguments+=(--extra-index-url "$_cpu_index")
    fi
    if command -v uv >/dev/null; then
        uv venv --quiet --seed --allow-existing --python "$python" "$_root/.venv" || return 2
        uv pip install --python "$_root/.venv/bin/python" --index-strategy unsafe-best-match \
            "${arguments[@]}" || return 2
    else
        local venv_output # shown only if venv fails, so that Ctrl-C shows no traceback
        if ! "$_root/.venv/bin/python" -m pip -V >/dev/null 2>&1 &&
            ! venv_output=$("$python" -m venv "$_root/.venv" 2>&1); then
            echo "$venv_output" >&2
            echo "error: $python cannot create virtual environments. Install its venv package (Debian, Ubuntu: apt-get install python3-venv)." >&2
            return 2
        fi
        "$_root/.venv/bin/python" -u -m pip install --disable-pip-version-check "${arguments[@]}" | _one_line
        [ "${PIPESTATUS[0]}" = 0 ] || return 2
    fi
}

_setup() {
    if [ "$(uname -s)" != Linux ]; then
        echo "error: $(uname -s) is not supported. Use Linux, or WSL 2 on Windows: wsl --install." >&2
        return 2
    fi
    if { [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -e "$_root/.venv" ]; } &&
        python "$_root/strategies/check_requirements.py" --ranges "${_files[@]}" 2>/dev/null; then
        return 0
    fi
    # If two runs start at the same time, the second waits for the first to finish its setup.
    exec 9>"$_root/.venv.lock"
    ! command -v flock >/dev/null || flock 9
    local python="$_root/.venv/bin/python"
    if ! "$python" "$_root/strategies/check_requirements.py" "${_files[@]}" 2>/dev/null; then
        local code=0
        _make_venv || code=$?
        if [ "$code" = 2 ]; then
            echo "error: Setting up .venv failed. See the message above, then run the same command again." >&2
        fi
        [ "$code" = 0 ] || return 2
        "$python" "$_root/strategies/check_requirements.py" "${_files[@]}" || return 2
    fi
    exec 9>&-
    export VIRTUAL_ENV="$_root/.venv" PATH="$_root/.venv/bin:$PATH"
}

# If the script is sourced in a terminal, `exit` would close the terminal.
_setup || return 2
