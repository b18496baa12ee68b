use clap::CommandFactory;

use super::*;
use crate::output::to_record;

#[test]
fn the_command_line_holds_together() {
    Cli::command().debug_assert();
}

#[test]
fn what_was_accepted_is_accepted() {
    let cli = ["rblk-bench", "cost", "--ops", "read", "--sizes", "4KiB", "--seed", "7"];
    assert!(matches!(Cli::try_parse_from(cli).unwrap().command, Command::Cost(_)));
}

#[test]
fn later_words_count() {
    let cli = [
        "rblk-bench",
        "compare",
        "--rounds",
        "1",
        "--rounds",
        "5",
        "--peer",
        "a=/a",
        "--peer",
        "b=/b",
    ];
    let Command::Compare(args) = Cli::try_parse_from(cli).unwrap().command else { panic!() };
    assert_eq!((args.rounds, args.peer.len()), (5, 2));
}

#[test]
fn directories_of_this_machine_are_not_kept() {
    let words = "/opt/x/rblk-bench compare --out /home/me/run --cells gate --programs=/opt/x";
    let kept = to_record(words.split(' ').map(str::to_owned));
    assert_eq!(kept, ["rblk-bench", "compare", "--cells", "gate"]);
    assert!(to_record(std::iter::empty()).len() == 1);
}
