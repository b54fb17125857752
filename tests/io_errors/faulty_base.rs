//! A base that takes no changes for a while: an apply fails in its middle, and so does setting the base back.

use super::*;

/// The store opens, shows the tree of before and works meanwhile; and the first start after that sets the base back.
#[test]
fn a_store_opens_and_works_while_its_base_takes_no_changes() {
    let before = [Place::new(Place::work).seen()];
    let mut cases = 0;
    for (number, errno) in
        ["EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM"].iter().enumerate()
    {
        for nth in (1 + number..).step_by(stride(9)) {
            let place = Place::new(Place::work);
            let sandbox = place.open().unwrap();
            let rules = format!("fail:base:{nth}+:{errno}");
            let is_done = failpoint::with(&rules, || {
                let applied = apply(&sandbox, false);
                drop(sandbox);
                let told = format!("{rules}, and it goes on: {applied:?}");
                if applied.is_err() {
                    place.copy().works_with(&before[0], &told);
                }
                applied.is_ok()
            });
            if is_done {
                break;
            }
            place.judge(&before, &before, &rules);
            cases += 1;
        }
    }
    eprintln!("{cases} cases");
    assert!(cases > 20);
}

/// A start that is refused a change of the base, as by a flag of a file, leaves the rest set back, and the next start does that.
#[test]
fn a_start_that_may_not_set_all_back_is_made_up_for_by_the_next() {
    let operation = Operation { writes_base: true, begin: Place::cut_off, acts: &[] };
    with_errnos(&operation, &[("EPERM", 1)]);
}
