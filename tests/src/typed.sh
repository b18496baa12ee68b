# Runs the words of the documents. The scripts that `guide.rs` makes consist of these commands, and a script that sources
# them has a function `die`. PROGRAMS: the directory of programs that stands for `.build/release`.

# known TEXT: the text with the keys of this host in the place of those in the documents.
known() {
    local text=$1
    case $text in *@TARGET_KEY@*) text=${text//@TARGET_KEY@/$(rblk-target key show)} ;; esac
    case $text in *@HOST_KEY@*) text=${text//@HOST_KEY@/$(rblk-initiator key show)} ;; esac
    printf '%s' "$text"
}
# step COMMAND: shown, and it works.
step() {
    local typed
    typed=$(known "$1")
    [ -n "$typed" ] || return 0
    echo "# $typed"
    bash -c "${typed//.build\/release/${PROGRAMS-.build/release}}" || die "$typed: $?"
}
# file PATH TEXT: its directory is there.
file() {
    echo "# write $1"
    { known "$2" && echo; } >"$1" || die "$1 cannot be written"
}
# line PATH TEXT
line() {
    echo "# add to $1: $2"
    echo "$2" >>"$1"
}
