//! Bounds what a client sends over a connection.
//!
//! A plain HTTP request may send its body and no byte more: further bytes would be a second
//! request, which the list has not judged. So the body is parsed as the origin parses it (RFC 9112,
//! section 6), and strictly. Chunk extensions, trailers and line ends without CR are refused,
//! because servers differ in how they read them.

/// The bytes that a client may still send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// Any bytes: a tunnel.
    Open,
    /// This many bytes.
    Length(u64),
    /// A chunked body.
    Chunked(Chunks),
}

/// The position in a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunks {
    /// In a chunk size, after this many digits.
    Size {
        digits: u8,
        size: u64,
    },
    /// After the CR of a chunk size.
    SizeEnd(u64),
    /// In a chunk, with this many bytes left.
    Data(u64),
    /// Before the CR after a chunk, then before its LF.
    DataCr,
    DataLf,
    /// Before the CR after the last chunk, then before its LF.
    LastCr,
    LastLf,
    Done,
}

/// The body violates RFC 9112 or the stricter rules above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

impl Body {
    pub(super) const NONE: Body = Body::Length(0);
    pub(super) const CHUNKED: Body = Body::Chunked(Chunks::Size { digits: 0, size: 0 });

    /// Whether the body is complete.
    pub(super) fn is_over(self) -> bool {
        matches!(self, Body::Length(0) | Body::Chunked(Chunks::Done))
    }

    /// The number of these bytes that belong to the body: all, or those up to its end.
    ///
    /// # Errors
    /// [`Malformed`].
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        match self {
            Body::Open => Ok(bytes.len()),
            Body::Length(left) => {
                let taken = u64::try_from(bytes.len()).unwrap_or(u64::MAX).min(*left);
                *left -= taken;
                usize::try_from(taken).map_err(|_| Malformed)
            }
            Body::Chunked(chunks) => chunks.take(bytes),
        }
    }
}

impl Chunks {
    fn take(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let mut taken = 0;
        while let Some(rest @ [byte, ..]) = bytes.get(taken..) {
            let (next, len) = match *self {
                Chunks::Data(left) => {
                    let len = rest.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    let left = left - u64::try_from(len).unwrap_or(left);
                    (if left == 0 { Chunks::DataCr } else { Chunks::Data(left) }, len)
                }
                Chunks::Done => break,
                other => (other.after(*byte)?, 1),
            };
            *self = next;
            taken += len;
        }
        Ok(taken)
    }

    /// The position after this byte.
    fn after(self, byte: u8) -> Result<Chunks, Malformed> {
        match (self, byte) {
            (Chunks::Size { digits: 1.., size }, b'\r') => Ok(Chunks::SizeEnd(size)),
            (Chunks::Size { digits: digits @ 0..15, size }, byte) => {
                let digit = char::from(byte).to_digit(16).ok_or(Malformed)?;
                Ok(Chunks::Size { digits: digits + 1, size: size << 4 | u64::from(digit) })
            }
            (Chunks::SizeEnd(0), b'\n') => Ok(Chunks::LastCr),
            (Chunks::SizeEnd(size), b'\n') => Ok(Chunks::Data(size)),
            (Chunks::DataCr, b'\r') => Ok(Chunks::DataLf),
            (Chunks::DataLf, b'\n') => Ok(Chunks::Size { digits: 0, size: 0 }),
            (Chunks::LastCr, b'\r') => Ok(Chunks::LastLf),
            (Chunks::LastLf, b'\n') => Ok(Chunks::Done),
            _ => Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds a body in pieces of every length. Returns how much was taken, and whether it is
    /// complete.
    fn fed(body: Body, bytes: &[u8]) -> Result<(usize, bool), Malformed> {
        let results: Vec<_> = (1..=bytes.len())
            .map(|piece| {
                let (mut body, mut taken) = (body, 0);
                for bytes in bytes.chunks(piece) {
                    let now = body.take(bytes)?;
                    taken += now;
                    if now < bytes.len() {
                        break;
                    }
                }
                Ok((taken, body.is_over()))
            })
            .collect();
        assert!(results.windows(2).all(|two| two[0] == two[1]), "the pieces matter: {results:?}");
        results[0]
    }

    #[test]
    fn nothing_behind_a_body_is_taken() {
        let next = "GET http://other/ HTTP/1.1\r\n\r\n";
        let with_next = |body: &str| fed(Body::CHUNKED, format!("{body}{next}").as_bytes());
        for body in
            ["0\r\n\r\n", "5\r\nhello\r\n0\r\n\r\n", "A\r\n0123456789\r\n00001\r\n\r\r\n0\r\n\r\n"]
        {
            assert_eq!(with_next(body), Ok((body.len(), true)), "{body:?}");
        }
        assert_eq!(fed(Body::Length(5), format!("hello{next}").as_bytes()), Ok((5, true)));
        assert_eq!(fed(Body::NONE, next.as_bytes()), Ok((0, true)));
        assert_eq!(fed(Body::Length(50), b"hello"), Ok((5, false)));
        assert_eq!(fed(Body::Open, next.as_bytes()), Ok((next.len(), false)));
    }

    #[test]
    fn chunks_that_programs_read_differently_are_refused() {
        for body in [
            "\r\n",
            "5\nhello\r\n",
            "5\r\nhello\n0\r\n\r\n",
            "5;ext=1\r\nhello\r\n",
            "+5\r\nhello\r\n",
            "0x5\r\nhello\r\n",
            " 5\r\nhello\r\n",
            "5 \r\nhello\r\n",
            "5\r\nhelloX\r\n",
            "0\r\nTrailer: x\r\n\r\n",
            "0\r\n\n",
            "1000000000000000\r\n",
            "ffffffffffffffffffff\r\n",
            "g\r\n",
            "-1\r\n",
        ] {
            assert_eq!(fed(Body::CHUNKED, body.as_bytes()), Err(Malformed), "{body:?}");
        }
    }
}
