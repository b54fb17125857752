//! Parses `WWW-Authenticate` (RFC 9110, section 11.6.1).

use super::super::http::{Answer, Url};

/// The most bytes of the field that are read.
const LONGEST: usize = 8 << 10;

/// How the registry wants to be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    /// A user and a password.
    Basic,
    /// A token of the server `realm`, for `service`, with `scope`.
    Bearer {
        /// The token server.
        realm: String,
        /// The name of the registry at the token server.
        service: Option<String>,
        /// The rights that the token must have.
        scopes: Vec<String>,
    },
}

/// The challenge of an answer with the status 401. A token is preferred over a password.
pub(super) fn of_answer(answer: &Answer) -> Option<Challenge> {
    let fields = answer.headers.get_all("www-authenticate").iter();
    let mut found: Vec<Challenge> =
        fields.filter_map(|field| field.to_str().ok()).flat_map(parse).collect();
    let bearer = found.iter().position(|one| *one != Challenge::Basic).unwrap_or(0);
    (!found.is_empty()).then(|| found.swap_remove(bearer))
}

/// The challenges of one field that are understood.
fn parse(field: &str) -> Vec<Challenge> {
    let mut found = Vec::new();
    let mut rest = field.get(..LONGEST).unwrap_or(field);
    let mut current: Option<(String, Vec<(String, String)>)> = None;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let end = rest.find([' ', '\t', ',', '=']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if word.is_empty() && after.is_empty() {
            break;
        }
        let value = after.trim_start_matches([' ', '\t']).strip_prefix('=');
        match (value, &mut current) {
            (Some(value), Some((_, parameters))) => {
                let (value, after) = value_of(value.trim_start_matches([' ', '\t']));
                parameters.push((word.to_ascii_lowercase(), value));
                rest = after;
            }
            (Some(value), None) => rest = value,
            (None, _) => {
                found.extend(current.take().and_then(challenge));
                current = Some((word.to_ascii_lowercase(), Vec::new()));
                rest = after;
            }
        }
    }
    found.extend(current.and_then(challenge));
    found
}

/// A token or a quoted string, and the rest behind it.
fn value_of(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', '\t', ',']).unwrap_or(text.len());
        let (value, rest) = text.split_at(end);
        return (value.to_owned(), rest);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, quoted.get(at + 1..).unwrap_or("")),
            '\\' => value.extend(chars.next().map(|(_, c)| c)),
            c => value.push(c),
        }
    }
    (value, "")
}

fn challenge((scheme, parameters): (String, Vec<(String, String)>)) -> Option<Challenge> {
    let find = |name: &str| {
        parameters.iter().find(|(found, _)| found == name).map(|(_, value)| value.clone())
    };
    match scheme.as_str() {
        "basic" => Some(Challenge::Basic),
        "bearer" => Some(Challenge::Bearer {
            realm: find("realm")?,
            service: find("service"),
            scopes: find("scope")
                .map(|scope| scope.split(' ').map(str::to_owned).collect())
                .unwrap_or_default(),
        }),
        _ => None,
    }
}

impl Challenge {
    /// The URL of the token server, if this is a challenge for a token.
    pub(super) fn realm(&self) -> Option<Result<Url, &'static str>> {
        match self {
            Challenge::Basic => None,
            Challenge::Bearer { realm, .. } => Some(Url::parse(realm)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(realm: &str, service: Option<&str>, scopes: &[&str]) -> Challenge {
        Challenge::Bearer {
            realm: realm.into(),
            service: service.map(str::to_owned),
            scopes: scopes.iter().map(|scope| (*scope).to_owned()).collect(),
        }
    }

    #[test]
    fn challenges_of_real_registries_are_parsed() {
        let hub = concat!(
            r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io","#,
            r#"scope="repository:library/a:pull,push""#,
        );
        let scope = ["repository:library/a:pull,push"];
        let expected = bearer("https://auth.docker.io/token", Some("registry.docker.io"), &scope);
        assert_eq!(parse(hub), [expected]);
        assert_eq!(parse(r#"Basic realm="basic-realm""#), [Challenge::Basic]);
        let two = r#"Basic realm="a, b=\"c\"", bearer Realm=https://h/t, SCOPE="x y""#;
        assert_eq!(parse(two), [Challenge::Basic, bearer("https://h/t", None, &["x", "y"])]);
    }

    #[test]
    fn garbage_gives_no_challenge_and_ends() {
        for bad in
            ["", ",,,", "=", "a=b", "Negotiate abc==", "Bearer", "Bearer realm", "\"", "x=\""]
        {
            assert_eq!(parse(bad), [], "{bad}");
        }
        let unclosed = bearer("https://h", None, &[]);
        assert_eq!(parse("Bearer realm=\"https://h"), [unclosed]);
        assert_eq!(parse(&"Bearer ".repeat(100_000)), []);
        assert!(parse(&format!("{}é", "a".repeat(LONGEST - 1))).is_empty());
    }
}
