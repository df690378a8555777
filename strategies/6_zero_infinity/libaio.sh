# Source this script to make libaio usable without root if the system lacks libaio.
#
# DeepSpeed compiles its file I/O against libaio. If the compiler does not find it, this script
# downloads the Debian packages (without installing them) into .venv/libaio and points the compiler
# and loader there. On systems without apt-get, it only names the package to install.

_aio_probe() {
    printf '#include <libaio.h>\nint main(void){return io_setup(1,(io_context_t*)0);}\n' |
        "${CC:-cc}" -x c - -o /dev/null -laio 2>/dev/null
}

_aio_use() {
    local lib
    lib=$(dirname "$(find "$1" -name 'libaio.so' | head -n 1)")
    export CPATH="$1/usr/include${CPATH:+:$CPATH}"
    export LIBRARY_PATH="$lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
    export LD_LIBRARY_PATH="$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

_aio_fetch() (
    mkdir -p "$1/lists/partial" && cd "$1" || exit 1
    options=(-q -o "Dir::State::Lists=$1/lists" -o "APT::Sandbox::User=$(id -un)")
    apt-get "${options[@]}" update || exit 1
    runtime=libaio1
    apt-cache "${options[@]}" show libaio1t64 >/dev/null 2>&1 && runtime=libaio1t64
    apt-get "${options[@]}" download "$runtime" libaio-dev || exit 1
    for package in "$1"/libaio*.deb; do dpkg -x "$package" "$1" || exit 1; done
)

if ! _aio_probe; then
    _aio_folder="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv/libaio"
    if [ ! -e "$_aio_folder/usr/include/libaio.h" ] && command -v apt-get dpkg >/dev/null; then
        echo "libaio is not installed. Downloading a private copy into $_aio_folder ..." >&2
        mkdir -p "$_aio_folder"
        _aio_fetch "$_aio_folder" >"$_aio_folder/fetch.log" 2>&1 ||
            echo "note: The download failed. See $_aio_folder/fetch.log." >&2
    fi
    if [ -e "$_aio_folder/usr/include/libaio.h" ]; then
        _aio_use "$_aio_folder"
    fi
    _aio_probe || echo "note: libaio is not available. Install it with apt-get install libaio-dev (Debian, Ubuntu) or dnf install libaio-devel (Fedora, RHEL)." >&2
fi
