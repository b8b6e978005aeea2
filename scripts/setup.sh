# Sourced by the other scripts: the virtual environment, made on the first run and renewed when what it is made from
# changes. An interrupted set-up is simply done again, since the stamp is written last.
#
#   TREADLE_VENV     where the environment lives (default: .venv in the checkout)
#   TREADLE_PYTHON   interpreter to make it with (default: the first of python3.11 or later that is found)

set -euo pipefail

treadle_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
treadle_venv="${TREADLE_VENV:-$treadle_root/.venv}"
treadle_python="$treadle_venv/bin/python"

# set_up [dev]: make the environment usable; with `dev`, tools for development too.
set_up() {
  local extras="${1:-}" wanted
  wanted="$(_digest)"
  if _is_stamped "$wanted" "$extras"; then
    return
  fi
  # One set-up at a time; the second then finds the work done. Any file can carry the lock; this one is always there.
  # Without flock (macOS) nothing keeps two apart.
  exec 9<"$treadle_root/scripts/constraints.txt"
  if command -v flock >/dev/null; then
    flock -n 9 || { echo "waiting for another set-up of $treadle_venv ..." >&2; flock 9; }
  fi
  if ! _is_stamped "$wanted" "$extras"; then
    _make_venv
    _install "$extras"
    printf '%s %s\n' "$wanted" "$extras" >"$treadle_venv/treadle-stamp.new"
    mv "$treadle_venv/treadle-stamp.new" "$treadle_venv/treadle-stamp"
  fi
  exec 9>&-
}

_digest() {
  cat "$treadle_root/pyproject.toml" "$treadle_root/scripts/constraints.txt" | cksum | tr ' ' '-'
}

# An environment with the tools for development serves as well.
_is_stamped() {
  local digest='' extras=''
  [[ -x "$treadle_python" && -f "$treadle_venv/treadle-stamp" ]] || return 1
  read -r digest extras <"$treadle_venv/treadle-stamp" || true
  [[ "$digest" == "$1" && ( "$extras" == "$2" || "$extras" == dev ) ]]
}

_make_venv() {
  if [[ -x "$treadle_python" ]] && "$treadle_python" -c 'import pip' 2>/dev/null; then
    return
  fi
  if [[ -d "$treadle_venv" && ! -f "$treadle_venv/pyvenv.cfg" && -n "$(ls -A "$treadle_venv")" ]]; then
    echo "treadle: $treadle_venv exists and is no virtual environment; set TREADLE_VENV to another place." >&2
    exit 1
  fi
  local python
  python="$(_find_python)"
  echo "making a virtual environment in $treadle_venv ..." >&2
  if ! "$python" -m venv --clear "$treadle_venv" >&2; then
    echo "treadle: $python -m venv failed. On Debian and Ubuntu, install the package python3-venv." >&2
    exit 1
  fi
}

_find_python() {
  local candidate
  for candidate in ${TREADLE_PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "treadle: Python 3.11 or later is needed, and none was found as ${TREADLE_PYTHON:-python3}." >&2
  echo "         Install it, or name it: TREADLE_PYTHON=/path/to/python3.11 $0" >&2
  exit 1
}

_install() {
  local target="$treadle_root${1:+[$1]}" log="$treadle_venv/treadle-install.log"
  echo "installing Treadle and what it needs (some minutes the first time; log in $log) ..." >&2
  if ! "$treadle_python" -m pip install --disable-pip-version-check --progress-bar off \
    -c "$treadle_root/scripts/constraints.txt" -e "$target" 2>&1 | tee "$log" | _show_progress; then
    tail -n 20 "$log" >&2
    echo "treadle: the installation failed; the lines above say why. Run the same command to try again." >&2
    exit 1
  fi
}

# One line that changes on a terminal, silence elsewhere.
_show_progress() {
  local line
  while IFS= read -r line; do
    if [[ -t 2 && "$line" =~ ^\ *(Collecting|Downloading|Building|Installing)\ ([^ ]+) ]]; then
      printf '\r\033[K  %s %.60s' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]##*/}" >&2
    fi
  done
  if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}
