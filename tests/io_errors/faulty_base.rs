//! A base that accepts no changes for a while: an apply fails in its middle, and so does its
//! rollback.

use super::*;

/// Meanwhile the store opens, shows the earlier tree and works; the first start afterwards rolls
/// the base back.
#[test]
fn a_store_opens_and_works_while_its_base_accepts_no_changes() {
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
                let context = format!("{rules}, and it goes on: {applied:?}");
                if applied.is_err() {
                    place.copy().works_with(&before[0], &context);
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

/// If one change of the base is refused in a rollback, for example by a file flag, the rest is
/// rolled back, and the next start does that one.
#[test]
fn an_incomplete_rollback_is_finished_by_the_next_start() {
    let operation = Operation { writes_base: true, begin: Place::cut_off, acts: &[] };
    with_errnos(&operation, &[("EPERM", 3)]);
}
