//! [`addresses`]: the addresses at which a target listens.

use rblk_config::TargetConfig;
use rblk_fabric::Address;

/// The addresses of a configuration.
///
/// # Errors
/// One of them is no address.
pub(crate) fn addresses(config: &TargetConfig) -> anyhow::Result<Vec<Address>> {
    Ok(config.listen.iter().map(|a| a.parse()).collect::<Result<_, _>>()?)
}
