//! Transfers that are cut, and registries that are overloaded.

use std::io::Cursor;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::server::{Exchange, Head};
use super::*;
use crate::types::ByteRange;

/// A registry with one blob, which follows the specification. It cuts connections after a number of
/// bytes of a body, in either direction.
struct Model {
    blob: Mutex<Option<Vec<u8>>>,
    session: Mutex<Vec<u8>>,
    /// Bodies are cut after so many bytes.
    cut_after: usize,
    /// So many bodies are cut.
    cuts: AtomicU32,
    knows_ranges: bool,
}

impl Model {
    fn new(blob: Option<Vec<u8>>, cut_after: usize, cuts: u32) -> Model {
        let (blob, cuts) = (Mutex::new(blob), AtomicU32::new(cuts));
        Model { blob, session: Mutex::default(), cut_after, cuts, knows_ranges: true }
    }

    fn is_cut(&self) -> bool {
        let next = |left: u32| left.checked_sub(1);
        self.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok()
    }

    fn serve(&self, head: &Head, answer: &mut Exchange) {
        let blob = self.blob.lock().unwrap().clone();
        match (head.method.as_str(), blob) {
            ("HEAD", None) => answer.answer(404, &[], ""),
            ("HEAD", Some(blob)) => {
                let length = blob.len().to_string();
                answer.answer(200, &[("content-length", &length)], "");
            }
            ("GET", Some(blob)) if head.path.contains("/blobs/sha256:") => {
                self.give(head, answer, &blob);
            }
            ("POST", _) => {
                self.session.lock().unwrap().clear();
                answer.answer(202, &[("location", "/v2/a/blobs/uploads/1?state=x")], "");
            }
            ("GET", None) => self.tell(answer, 204),
            ("PATCH" | "PUT", None) => self.take(head, answer),
            _ => answer.answer(404, &[], ""),
        }
    }

    fn give(&self, head: &Head, answer: &mut Exchange, blob: &[u8]) {
        let range = head.field("range").filter(|_| self.knows_ranges);
        let range = range.map(|text| {
            let (first, last) = text.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            (first.parse::<usize>().unwrap(), last.parse::<usize>().unwrap())
        });
        let (status, first, last) = match range {
            Some((first, last)) => (206, first, last),
            None => (200, 0, blob.len() - 1),
        };
        let body = &blob[first..=last];
        let text = format!("bytes {first}-{last}/{}", blob.len());
        if !self.is_cut() {
            answer.answer(status, &[("content-range", &text)], body);
            return;
        }
        let sent = self.cut_after.min(body.len());
        let length = body.len().to_string();
        let fields = [("content-range", text.as_str()), ("content-length", &length)];
        answer.answer(status, &fields, &body[..sent]);
        answer.cut();
    }

    fn tell(&self, answer: &mut Exchange, status: u16) {
        let range = format!("0-{}", self.session.lock().unwrap().len().saturating_sub(1));
        let location = "/v2/a/blobs/uploads/1?state=y";
        answer.answer(status, &[("range", &range), ("location", location)], "");
    }

    fn take(&self, head: &Head, answer: &mut Exchange) {
        let at = self.session.lock().unwrap().len();
        let range = head.field("content-range").unwrap_or("0-");
        if range.split('-').next().unwrap().parse() != Ok(at) {
            return self.tell(answer, 416);
        }
        let most = if self.is_cut() { self.cut_after } else { usize::MAX };
        let mut buffer = [0; 1000];
        let mut read = 0;
        loop {
            let wanted = buffer.len().min(most - read);
            match answer.read(&mut buffer[..wanted]) {
                0 => break,
                count => {
                    self.session.lock().unwrap().extend(&buffer[..count]);
                    read += count;
                }
            }
        }
        if most != usize::MAX {
            return answer.cut();
        }
        if head.method == "PATCH" {
            return self.tell(answer, 202);
        }
        let bytes = self.session.lock().unwrap().clone();
        let digest = Digest::of(&bytes).to_string();
        assert!(head.path.contains(&digest.replace(':', "%3A")), "{}", head.path);
        *self.blob.lock().unwrap() = Some(bytes);
        answer.answer(201, &[("docker-content-digest", &digest)], "");
    }
}

fn start(model: Model) -> (Arc<Model>, Server) {
    let model = Arc::new(model);
    let served = model.clone();
    (model, Server::new(move |head, answer| served.serve(head, answer)))
}

#[test]
fn a_download_goes_on_where_it_was_cut() {
    let bytes = noise(400_000);
    for knows_ranges in [true, false] {
        // A registry without ranges makes no progress after the first cut.
        let cuts = if knows_ranges { 3 } else { 2 };
        let model = Model::new(Some(bytes.clone()), 90_000, cuts);
        let (_, server) = start(Model { knows_ranges, ..model });
        let mut sink = Vec::new();
        let mut seen = Vec::new();
        let mut report = |progress: Progress| seen.push(progress.moved);
        let meter = Meter::new(bytes.len() as u64, &mut report);
        let blob = Descriptor::of(&bytes);
        repository(&server).fetch_blob(&blob, &mut sink, &meter).unwrap();
        assert_eq!(Digest::of(&sink), blob.digest);
        assert!(seen.is_sorted() && seen.last() == Some(&400_000), "{seen:?}");
        let ranges: Vec<_> =
            server.heads().iter().map(|head| head.field("range").map(str::to_owned)).collect();
        assert_eq!(ranges.first(), Some(&None));
        if knows_ranges {
            assert_eq!(ranges.get(1).cloned().flatten().as_deref(), Some("bytes=90000-399999"));
            assert_eq!(ranges.len(), 4);
        }
    }
}

#[test]
fn a_range_of_a_blob_is_downloaded_alone() {
    let bytes = noise(200_000);
    for knows_ranges in [true, false] {
        let model = Model::new(Some(bytes.clone()), 30_000, 1);
        let (_, server) = start(Model { knows_ranges, ..model });
        let mut sink = Vec::new();
        let range = ByteRange { start: 1000, end: 91_000 };
        let blob = Descriptor::of(&bytes);
        let repository = repository(&server);
        repository.fetch_range(&blob, range, &mut sink, &Meter::silent()).unwrap();
        assert!(sink == bytes[1000..91_000]);
    }
}

#[test]
fn an_upload_goes_on_where_it_was_cut() {
    let bytes = noise(350_000);
    let (model, server) = start(Model::new(None, 70_000, 2));
    let mut last = 0;
    let mut report = |progress: Progress| last = progress.moved;
    let meter = Meter::new(bytes.len() as u64, &mut report);
    let (blob, mut source) = (Descriptor::of(&bytes), Cursor::new(&bytes));
    let repository = repository(&server);
    let pushed = repository.push_blob(&blob, &mut source, None, &meter).unwrap();
    assert_eq!(pushed, Pushed::Uploaded);
    assert!(model.blob.lock().unwrap().as_ref() == Some(&bytes));
    assert_eq!(last, 350_000);
    let posts = server.requests().iter().filter(|text| text.starts_with("POST")).count();
    assert_eq!(posts, 1, "one session is enough");
    let again = repository.push_blob(&blob, &mut source, None, &Meter::silent()).unwrap();
    assert_eq!(again, Pushed::Existed);
}

#[test]
fn a_blob_that_arrived_in_spite_of_a_cut_is_not_sent_again() {
    let bytes = noise(1000);
    let (model, _) = start(Model::new(None, 0, 0));
    let server = Server::new(move |head, answer| {
        if head.method != "PUT" {
            return model.serve(head, answer);
        }
        *model.blob.lock().unwrap() = Some(answer.body());
        answer.cut();
    });
    let (blob, mut source) = (Descriptor::of(&bytes), Cursor::new(&bytes));
    let meter = Meter::silent();
    repository(&server).push_blob(&blob, &mut source, None, &meter).unwrap();
    let puts = server.requests().iter().filter(|text| text.starts_with("PUT")).count();
    assert_eq!(puts, 1);
}

#[test]
fn a_source_that_is_too_short_is_an_error_about_the_source() {
    let bytes = noise(1000);
    let (_, server) = start(Model::new(None, 0, 0));
    let mut source = Cursor::new(&bytes[..900]);
    let error = repository(&server)
        .push_blob(&Descriptor::of(&bytes), &mut source, None, &Meter::silent())
        .unwrap_err();
    assert!(error.reason.contains("cannot read the blob: the blob is too short"), "{error}");
}

#[test]
fn a_sink_that_is_full_is_an_error_about_the_sink() {
    let bytes = noise(1000);
    let (_, server) = start(Model::new(Some(bytes.clone()), 0, 0));
    let mut full = [0; 10];
    let error = repository(&server)
        .fetch_blob(&Descriptor::of(&bytes), &mut &mut full[..], &Meter::silent())
        .unwrap_err();
    assert!(error.reason.contains("cannot write the blob"), "{error}");
    assert_eq!(server.requests().len(), 1, "it is not repeated");
}

#[test]
fn a_blob_is_mounted_from_another_repository_if_the_registry_can() {
    let bytes = noise(1000);
    for can in [true, false] {
        let (model, _) = start(Model::new(None, 0, 0));
        let server = Server::new(move |head, answer| {
            if can && head.path.contains("mount=sha256%3A") && head.path.contains("from=b%2Fc") {
                return answer.answer(201, &[("location", "/v2/a/blobs/x")], "");
            }
            model.serve(head, answer);
        });
        let mut source = Cursor::new(&bytes);
        let pushed = repository(&server)
            .push_blob(&Descriptor::of(&bytes), &mut source, Some("b/c"), &Meter::silent())
            .unwrap();
        assert_eq!(pushed, if can { Pushed::Mounted } else { Pushed::Uploaded });
    }
}

#[test]
fn an_overloaded_registry_is_asked_again() {
    for status in [429, 500, 502, 503, 504] {
        let number = AtomicU32::new(0);
        let server = Server::new(move |_, answer| match number.fetch_add(1, Ordering::SeqCst) {
            0 => answer.answer(status, &[("retry-after", "0")], ""),
            _ => answer.answer(200, &[], r#"{"tags": null}"#),
        });
        assert_eq!(repository(&server).tags().unwrap(), Vec::<String>::new());
        assert_eq!(server.requests().len(), 2);
    }
    let server = Server::new(|_, answer| answer.answer(503, &[("retry-after", "3600")], ""));
    let error = repository(&server).tags().unwrap_err();
    assert_eq!(error.hint.as_deref(), Some("the registry asks to wait 3600 seconds"));
    assert_eq!(server.requests().len(), 1);
}
