//! Formats times for people: UTC, in the proleptic Gregorian calendar.

use crate::types::Timestamp;

const SECS_PER_DAY: i64 = 86_400;

/// Formats a time as `2026-01-02 03:04:05Z`, without its nanoseconds. A year above 9999 has more
/// digits, a year below 0 has a sign.
pub(crate) fn utc(time: Timestamp) -> String {
    let (year, month, day) = civil(time.secs.div_euclid(SECS_PER_DAY));
    let secs = time.secs.rem_euclid(SECS_PER_DAY);
    let (hour, minute, second) = (secs / 3600, secs / 60 % 60, secs % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

/// The year, month and day of a day that is counted from 1970-01-01. The calculation starts years
/// on 1 March, so that the leap day is the last day of its year (Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms").
fn civil(day: i64) -> (i64, i64, i64) {
    let day = day + 719_468;
    let era = day.div_euclid(146_097);
    let of_era = day.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day_of_month = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day_of_month)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: i64) -> String {
        utc(Timestamp { secs, nanos: 999_999_999 })
    }

    #[test]
    fn known_times_have_their_usual_text() {
        let table = [
            (0, "1970-01-01 00:00:00Z"),
            (-1, "1969-12-31 23:59:59Z"),
            (951_782_400, "2000-02-29 00:00:00Z"),
            (951_868_799, "2000-02-29 23:59:59Z"),
            (951_868_800, "2000-03-01 00:00:00Z"),
            (1_709_164_800, "2024-02-29 00:00:00Z"),
            (1_767_323_045, "2026-01-02 03:04:05Z"),
            (4_107_542_400, "2100-03-01 00:00:00Z"),
            (253_402_300_800, "10000-01-01 00:00:00Z"),
            (-62_135_596_800, "0001-01-01 00:00:00Z"),
        ];
        for (secs, text) in table {
            assert_eq!(at(secs), text);
        }
    }

    #[test]
    fn every_time_has_a_text() {
        for secs in [i64::MIN, i64::MAX, i64::MIN + 1, i64::MAX - 1] {
            assert!(at(secs).ends_with('Z'));
        }
    }

    #[test]
    fn later_days_have_later_dates() {
        let mut before = civil(-200_000);
        for day in -199_999..200_000 {
            let now = civil(day);
            assert!(
                now > before && (1..=12).contains(&now.1) && (1..=31).contains(&now.2),
                "{now:?}"
            );
            before = now;
        }
    }
}
