//! Tells public internet addresses from those of this machine and of private networks.
//!
//! The owner of a listed name decides in the DNS to which address it resolves. So a special address
//! must be in the list itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IPv4 blocks that are not public: the first address, and the prefix length. From IANA's registry
/// of special-purpose addresses (RFC 6890), plus multicast and reserved blocks.
const SPECIAL: &[([u8; 4], u32)] = &[
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    ([192, 0, 0, 0], 24),
    ([192, 0, 2, 0], 24),
    ([192, 88, 99, 0], 24),
    ([192, 168, 0, 0], 16),
    ([198, 18, 0, 0], 15),
    ([198, 51, 100, 0], 24),
    ([203, 0, 113, 0], 24),
    ([224, 0, 0, 0], 4),
    ([240, 0, 0, 0], 4),
    // The metadata services of Azure and of Alibaba, which do not use link-local addresses.
    ([168, 63, 129, 16], 32),
    ([100, 100, 100, 200], 32),
];

/// Whether an address is of this machine, of a network around it, or of no host at all: loopback,
/// link-local, private, metadata services, multicast, reserved, or such an address within IPv6.
pub(super) fn is_special(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_special_v4(address),
        IpAddr::V6(address) => is_special_v6(address),
    }
}

fn is_special_v4(address: Ipv4Addr) -> bool {
    let bits = u32::from(address);
    SPECIAL.iter().any(|(first, count)| {
        let mask = u32::MAX.checked_shl(32 - count).unwrap_or(0);
        bits & mask == u32::from(Ipv4Addr::from(*first)) & mask
    })
}

fn is_special_v6(address: Ipv6Addr) -> bool {
    let [a, b, c, d, e, f, g, h] = address.segments();
    // NAT64 (RFC 6052) leads to the address of IPv4 in it.
    if [a, b, c, d, e, f] == [0x64, 0xff9b, 0, 0, 0, 0] {
        return is_special_v4(Ipv4Addr::from(u32::from(g) << 16 | u32::from(h)));
    }
    // Only this block is of the internet. Of it, Teredo, what is for protocols and documentation,
    // and 6to4 are not.
    let is_global = a & 0xe000 == 0x2000;
    let is_carved_out = match a {
        0x2001 => b < 0x0200 || b == 0x0db8,
        0x2002 => true,
        0x3fff => b < 0x1000,
        _ => false,
    };
    !is_global || is_carved_out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_internet_are_not_special() {
        for special in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.255",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "168.63.129.16",
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "fec0::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001::1",
            "2001:db8::1",
            "100::1",
            "3fff::1",
        ] {
            assert!(is_special(special.parse().unwrap()), "{special}");
        }
        for of_the_internet in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "128.0.0.0",
            "172.15.0.1",
            "172.32.0.1",
            "192.167.1.1",
            "8.8.8.8",
            "223.255.255.255",
            "2606:4700::1111",
            "2001:4860:4860::8888",
            "2a00:1450::1",
            "64:ff9b::808:808",
            "::ffff:8.8.8.8",
        ] {
            assert!(!is_special(of_the_internet.parse().unwrap()), "{of_the_internet}");
        }
    }
}
