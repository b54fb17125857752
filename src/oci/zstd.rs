//! Reads an archive that is compressed by zstd (RFC 8878): frames one after the other. Skippable
//! frames, which hold data for other programs, are passed over.

use std::io::{self, BufRead, ErrorKind, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// How many earlier bytes a frame may refer to. They are held in memory. The levels up to 19 of
/// zstd need at most 8 MiB.
const MAX_WINDOW: u64 = 64 << 20;

/// The bytes of an archive without compression.
pub(super) struct Decoder<R> {
    from: R,
    frame: FrameDecoder,
    is_in_frame: bool,
}

impl<R: BufRead> Decoder<R> {
    pub(super) fn new(from: R) -> Decoder<R> {
        let mut frame = FrameDecoder::new();
        frame.set_max_window_size(MAX_WINDOW);
        Decoder { from, frame, is_in_frame: false }
    }

    /// Begins the next frame that holds content. Returns whether there is one.
    fn begin_frame(&mut self) -> io::Result<bool> {
        while !self.from.fill_buf()?.is_empty() {
            match self.frame.reset(&mut self.from) {
                Ok(()) => {
                    self.is_in_frame = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped = &mut (&mut self.from).take(length.into());
                    if io::copy(skipped, &mut io::sink())? < length.into() {
                        return Err(ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(malformed(&error)),
            }
        }
        Ok(false)
    }

    /// Ends a frame after its last byte was given out.
    fn end_frame(&mut self) -> io::Result<()> {
        self.is_in_frame = false;
        let written = self.frame.get_checksum_from_data();
        if written.is_some() && written != self.frame.get_calculated_checksum() {
            return Err(io::Error::new(ErrorKind::InvalidData, "wrong checksum of a zstd frame"));
        }
        Ok(())
    }
}

fn malformed(error: &FrameDecoderError) -> io::Error {
    let why = match error {
        FrameDecoderError::WindowSizeTooBig { requested, max } => format!(
            "a zstd frame with a window of {} MiB, and at most {} MiB are read",
            requested >> 20,
            max >> 20
        ),
        error => format!("malformed zstd frame: {error}"),
    };
    io::Error::new(ErrorKind::InvalidData, why)
}

impl<R: BufRead> Read for Decoder<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.is_in_frame && !self.begin_frame()? {
                return Ok(0);
            }
            while !self.frame.is_finished() && self.frame.can_collect() == 0 {
                let one_block = BlockDecodingStrategy::UptoBlocks(1);
                let decoded = self.frame.decode_blocks(&mut self.from, one_block);
                decoded.map_err(|error| malformed(&error))?;
            }
            let read = self.frame.read(to)?;
            if read > 0 {
                return Ok(read);
            }
            self.end_frame()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    fn decode(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut plain = Vec::new();
        Decoder::new(bytes).read_to_end(&mut plain).map(|_| plain)
    }

    fn frame(plain: &[u8]) -> Vec<u8> {
        compress_to_vec(plain, CompressionLevel::Fastest)
    }

    fn skippable(len: usize) -> Vec<u8> {
        let len_field = u32::try_from(len).unwrap().to_le_bytes();
        [&0x184D_2A55_u32.to_le_bytes()[..], &len_field, &vec![9; len]].concat()
    }

    #[test]
    fn frames_are_joined_and_skippable_ones_are_passed_over() {
        let long: Vec<u8> = (0..600_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let parts =
            [skippable(0), frame(&long), skippable(300), frame(b""), frame(b"end"), skippable(4)];
        assert_eq!(decode(&parts.concat()).unwrap(), [&long[..], b"end"].concat());
        assert!(decode(b"").unwrap().is_empty());
    }

    #[test]
    fn a_frame_that_is_cut_or_changed_is_an_error() {
        let plain: Vec<u8> = (0..2000_u32).flat_map(|n| (n * n).to_le_bytes()).collect();
        let whole = [frame(&plain), skippable(9)].concat();
        for cut in 1..whole.len() {
            let read = decode(&whole[..cut]);
            assert!(read.is_err() || cut == whole.len() - 17, "cut at {cut}");
        }
        for at in 0..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 0x10;
            if let Ok(read) = decode(&bad) {
                assert_eq!(read, plain, "changed at {at}");
            }
        }
        let error = decode(&[&whole[..], b"other"].concat()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn a_frame_with_a_large_window_takes_no_memory() {
        // A frame header without a content size: the window is 2^(10 + 21) bytes.
        let bytes = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 21 << 3, 0x01, 0x00, 0x00];
        let error = decode(&bytes).unwrap_err();
        assert!(error.to_string().contains("window of 2048 MiB"), "{error}");
    }
}
