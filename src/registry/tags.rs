//! Lists the tags of a repository, page by page.
//!
//! The list is bounded: at most 100,000 tags on at most 1000 pages. A page that leads to one that
//! was seen, or that brings no tag, ends the list with an error.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::Repository;
use super::auth::Scopes;
use super::fault::{Fault, shown};
use super::http::{Answer, Call, Url, Verb};
use super::limits::{TAG_PAGE, TAG_PAGES, TAGS};
use super::reference::is_tag;
use super::retry::repeated;
use crate::error::Result;

/// A page of the list.
#[derive(Deserialize)]
struct Page {
    tags: Option<Vec<String>>,
}

impl Repository {
    /// All tags in the order of their bytes. A repository that does not exist has none.
    ///
    /// # Errors
    /// The registry refuses, sends something else, or the list is too long.
    pub fn tags(&self) -> Result<Vec<String>> {
        let mut tags = BTreeSet::new();
        let mut url = self.url("tags/list").with("n", "1000");
        for number in 0.. {
            let (page, next, request) = repeated(&self.limits, || self.tag_page(url.clone()))?;
            let before = tags.len();
            tags.extend(page);
            let is_too_long = tags.len() > TAGS || (next.is_some() && number + 1 >= TAG_PAGES);
            if is_too_long {
                let reason = format!("the list exceeds {TAGS} tags or {TAG_PAGES} pages");
                return Err(Fault::last(&request, reason).into());
            }
            let Some(next) = next else { break };
            if tags.len() == before {
                let reason = "a page of tags has no new tag, but leads to a next page";
                return Err(Fault::last(&request, reason).into());
            }
            url = next;
        }
        Ok(tags.into_iter().collect())
    }

    fn tag_page(&self, url: Url) -> std::result::Result<(Vec<String>, Option<Url>, String), Fault> {
        let mut call = Call::new(Verb::GET, url);
        let answer = self.exchange(&mut call, &Scopes::pull(&self.name))?;
        if answer.status == 404 {
            let request = answer.request.clone();
            answer.finish();
            return Ok((Vec::new(), None, request));
        }
        let mut answer = answer.expect(&[200])?;
        let body = answer.bytes(TAG_PAGE)?;
        let malformed = |error: serde_json::Error| {
            Fault::last(&answer.request, format!("the list of tags is malformed: {error}"))
        };
        let page: Page = serde_json::from_slice(&body).map_err(malformed)?;
        let tags = page.tags.unwrap_or_default();
        if let Some(bad) = tags.iter().find(|tag| !is_tag(tag)) {
            let reason = format!("the list has '{}', which is no tag", shown(bad));
            return Err(Fault::last(&answer.request, reason));
        }
        let next = next_page(&answer)?;
        Ok((tags, next, answer.request))
    }
}

/// The URL of the next page, by `Link: <URL>; rel="next"`.
fn next_page(answer: &Answer) -> std::result::Result<Option<Url>, Fault> {
    let Some(link) = answer.header("link") else { return Ok(None) };
    let Some(target) = next_target(link) else { return Ok(None) };
    let bad = |reason: &str| Fault::last(&answer.request, format!("its next page: {reason}"));
    let next = answer.url.join(target).map_err(bad)?;
    if next.origin == answer.url.origin && !answer.is_elsewhere {
        return Ok(Some(next));
    }
    Err(bad("it is at another host"))
}

fn next_target(link: &str) -> Option<&str> {
    link.split(',').find_map(|one| {
        let (target, parameters) = one.trim().strip_prefix('<')?.split_once('>')?;
        let mut parameters = parameters.split(';').map(str::trim);
        parameters.any(|text| text == "rel=next" || text == "rel=\"next\"").then_some(target)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_found_among_links() {
        assert_eq!(next_target(r#"</a>; rel="prev", </b?n=1>; rel="next""#), Some("/b?n=1"));
        assert_eq!(next_target("</a>;rel=next"), Some("/a"));
        for bad in ["", "</a>", "/a; rel=next", "</a; rel=next", r#"</a>; rel="nextish""#] {
            assert_eq!(next_target(bad), None, "{bad}");
        }
    }
}
