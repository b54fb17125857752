//! What happens to states over time: sealing, going back, comparing, applying.
