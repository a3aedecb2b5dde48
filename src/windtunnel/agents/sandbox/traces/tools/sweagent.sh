# File tools in the manner of SWE-agent, as shell functions. Own text; the behaviour follows that project's
# documentation: a window of 100 lines on the open file, edits by line numbers, by cursors or by text.
CURRENT_FILE=
CURRENT_LINE=1
_window() {
  [ -n "$CURRENT_FILE" ] || { echo 'No file open. Use the open command first.'; return 1; }
  awk -v at="$CURRENT_LINE" -v name="$CURRENT_FILE" '
    { line[NR] = $0 }
    END {
      from = at - 50; if (from > NR - 99) from = NR - 99; if (from < 1) from = 1
      to = from + 99; if (to > NR) to = NR
      print "[File: " name " (" NR " lines total)]"
      if (from > 1) print "(" from - 1 " more lines above)"
      for (i = from; i <= to; i++) print i ":" line[i]
      if (to < NR) print "(" NR - to " more lines below)"
    }' "$CURRENT_FILE"
}
open() {
  [ -f "$1" ] || { echo "File $1 not found"; return 1; }
  CURRENT_FILE=$(realpath "$1")
  CURRENT_LINE=${2:-1}
  _window
}
goto() { CURRENT_LINE=$1; _window; }
scroll_down() { CURRENT_LINE=$((CURRENT_LINE + 98)); _window; }
scroll_up() { CURRENT_LINE=$((CURRENT_LINE > 98 ? CURRENT_LINE - 98 : 1)); _window; }
set_cursors() { START_CURSOR=$1; END_CURSOR=$2; _window; }
create() {
  [ ! -e "$1" ] || { echo "Error: File '$1' already exists."; return 1; }
  echo > "$1" && open "$1"
}
edit_lines() {
  [ -n "$CURRENT_FILE" ] || { echo 'No file open. Use the open command first.'; return 1; }
  local range=${1:-${START_CURSOR:-1}:${END_CURSOR:-1}} new
  new=$(mktemp) || return
  cat > "$new.text"
  { head -n $((${range%:*} - 1)) "$CURRENT_FILE"
    cat "$new.text"
    sed "1,${range#*:}d" "$CURRENT_FILE"; } > "$new"
  cat "$new" > "$CURRENT_FILE"
  rm -f "$new" "$new.text"
  CURRENT_LINE=${range%:*}
  _window
  echo 'File updated.'
}
edit_text() {
  [ -n "$CURRENT_FILE" ] || { echo 'No file open. Use the open command first.'; return 1; }
  local text head
  text=$(cat "$CURRENT_FILE"; echo x)
  text=${text%x}
  case $text in *"$1"*) ;; *) echo 'Text not found in the open file.'; return 1 ;; esac
  head=${text%%"$1"*}
  if [ "${3,,}" = true ]; then text=${text//"$1"/"$2"}; else text=$head$2${text#*"$1"}; fi
  printf %s "$text" > "$CURRENT_FILE"
  CURRENT_LINE=$(($(printf %s "$head" | wc -l) + 1))
  _window
  echo 'Text replaced.'
}
insert_text() {
  [ -n "$CURRENT_FILE" ] || { echo 'No file open. Use the open command first.'; return 1; }
  local new
  new=$(mktemp) || return
  { sed -n "1,${2:-\$}p" "$CURRENT_FILE"; printf '%s\n' "$1"; [ -z "$2" ] || sed "1,${2}d" "$CURRENT_FILE"; } > "$new"
  cat "$new" > "$CURRENT_FILE"
  rm -f "$new"
  _window
}
find_file() { find "${2:-.}" -name "$1" -not -path '*/.git/*' | sort; }
search_dir() { grep -rIn --exclude-dir=.git -e "$1" "${2:-.}" | cut -d: -f1 | sort | uniq -c; }
search_file() { grep -n -e "$1" "${2:-$CURRENT_FILE}"; }
submit() {
  git rev-parse --git-dir > /dev/null 2>&1 || { echo 'nothing to submit: no repository'; return 0; }
  git add -A && git diff --cached > model.patch && cat model.patch
}
