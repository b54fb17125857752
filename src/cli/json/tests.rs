use super::*;
use crate::fs::{Refusal, Refused};
use crate::sandbox::ChangeKind;
use crate::types::{Epoch, Ino, LayerId, Timestamp};

fn change(path: &[u8]) -> Change {
    Change {
        path: TreePath::parse(path).unwrap(),
        kind: ChangeKind::Modified,
        old_path: None,
        file: FileKind::File,
        target: None,
        danger: None,
        ino: Ino(7),
        old_size: Some(1),
        new_size: Some(2),
        lines: Some((3, 4)),
        binary: false,
        patch: None,
    }
}

#[test]
fn utf8_text_is_unchanged() {
    let line = Line::change(&change("a/\"ä\n".as_bytes())).text().unwrap();
    assert_eq!(
        line,
        concat!(
            r#"{"type":"change","status":"M","path":"a/\"ä\n","old_path":null,"#,
            r#""file":"file","ino":7,"old_size":1,"new_size":2,"#,
            r#""lines_added":3,"lines_removed":4,"binary":false}"#
        )
    );
}

#[test]
fn bytes_that_are_not_utf8_are_also_in_hexadecimal() {
    let mut change = change(b"a\xff/b");
    change.old_path = Some(TreePath::parse(b"\xfe").unwrap());
    change.patch = Some(b"+\xfd".to_vec());
    let line: serde_json::Value =
        serde_json::from_str(&Line::change(&change).text().unwrap()).unwrap();
    assert_eq!((&line["path"], &line["path_hex"]), (&"a\u{fffd}/b".into(), &"61ff2f62".into()));
    assert_eq!(line["old_path_hex"], "fe");
    assert_eq!(line["patch_hex"], "2bfd");
}

#[test]
fn a_checkpoint_has_its_time_as_text_and_as_seconds() {
    let checkpoint = Checkpoint {
        id: LayerId(3),
        head: "main".to_owned(),
        name: Some("green".to_owned()),
        message: "tests pass".to_owned(),
        time: Timestamp { secs: 1_767_323_045, nanos: 6 },
        parent: Some(LayerId(2)),
        epoch: Epoch(0),
        automatic: false,
        current: true,
    };
    let text = Line::checkpoint(&checkpoint).text().unwrap();
    assert!(
        text.starts_with(r#"{"type":"checkpoint","id":3,"head":"main","name":"green""#),
        "{text}"
    );
    assert!(
        text.contains(r#""time":"2026-01-02 03:04:05Z","secs":1767323045,"nanos":6"#),
        "{text}"
    );
}

#[test]
fn every_tag_is_in_snake_case() {
    let path = TreePath::parse(b"l").unwrap();
    let refusal = |what| Refusal { path: path.clone(), what, pid: 7, process: b"cat".to_vec() };
    let text = Line::refusal(&refusal(Refused::Link(b"/etc\xff".to_vec()))).text().unwrap();
    assert_eq!(
        text,
        "{\"type\":\"refused_link\",\"path\":\"l\",\"target\":\"/etc\u{fffd}\",\
         \"target_hex\":\"2f657463ff\",\"pid\":7,\"process\":\"cat\"}"
    );
    let text = Line::refusal(&refusal(Refused::Rename(path.clone()))).text().unwrap();
    assert!(text.starts_with(r#"{"type":"refused_rename","path":"l","to":"l","pid":7"#), "{text}");
    assert!(
        Line::base_problem(&path, "EACCES").text().unwrap().contains(r#""type":"base_problem""#)
    );
}
