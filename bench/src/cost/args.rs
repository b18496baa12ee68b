//! The command line of `rblk-bench cost`.

use anyhow::{Result, ensure};
use clap::Args;
use rblk_config::ByteSize;
use rblk_protocol::limits;

use super::{Op, Plan, Report, Volume, aged, crc, hit_ratio, instructions, live, rig, time};

/// The cases to count.
#[derive(Clone, Debug, Args)]
pub struct CostArgs {
    /// Operations to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "read,write")]
    pub ops: Vec<Op>,
    /// Bytes per I/O, whole blocks of 512; with --instructions, --time or --live 4KiB unless given.
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    pub sizes: Vec<ByteSize>,
    /// I/Os outstanding.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,32")]
    pub depths: Vec<u16>,
    /// Depth of the queue; deeper where more are outstanding.
    #[arg(long, value_name = "N", default_value_t = limits::QUEUE_DEPTH_DEFAULT)]
    pub queue_depth: u16,
    /// I/Os of each case.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub ios: u64,
    /// Where the volume's bytes are.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "memory,cached")]
    pub volume: Vec<Volume>,
    /// Write data up to this size travels inside the command.
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(limits::IN_CAPSULE_DEFAULT_BYTES.into()))]
    pub inline: ByteSize,
    /// Answer READs with WRITE and SEND, as over devices without WRITE_WITH_IMM.
    #[arg(long)]
    pub no_immediates: bool,
    /// One capsule in each message, as with a peer that knows no lists.
    #[arg(long)]
    pub no_lists: bool,
    /// Data of one write in each message, as over TCP.
    #[arg(long)]
    pub no_data_lists: bool,
    /// Data of writes behind the commands, as with a peer that knows no other way: the target
    /// copies it out of its receive buffers
    #[arg(long)]
    pub no_data_first: bool,
    /// Capsules and data have digests (CRC-32C).
    #[arg(long)]
    pub digest: bool,
    /// READs the target may have outstanding.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub reads_out: u8,
    /// Seed of the in-memory fabric.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Count the instructions of both ends' engines instead, by valgrind (which must be installed).
    /// With --digest also the part of digests; the CRCs of the data are then counted as with --crc,
    /// as valgrind knows no AVX-512.
    #[arg(long, conflicts_with = "live")]
    pub instructions: bool,
    /// Fail if an engine takes more instructions per I/O than this.
    #[arg(long, value_name = "N", requires = "instructions")]
    pub at_most: Option<u32>,
    /// Name so many functions with the most instructions, per case.
    #[arg(long, value_name = "N", requires = "instructions", default_value_t = 0)]
    pub hottest: usize,
    /// The cost of one CRC: instructions, by single steps, and time.
    #[arg(long, conflicts_with_all = ["live", "instructions"])]
    pub crc: bool,
    /// All cases and settings, as JSON, instead of the flags.
    #[arg(long, hide = true)]
    pub plan: Option<String>,
    /// Calls of the counted process.
    #[arg(long, hide = true)]
    pub crc_calls: Option<u32>,
    /// The function that it calls.
    #[arg(long, hide = true, value_enum, default_value_t = crc::Called::Crc)]
    pub(crate) crc_called: crc::Called,
    /// Time both ends' engines instead, without the fabric under them.
    #[arg(long, conflicts_with_all = ["live", "instructions", "crc"])]
    pub time: bool,
    /// Count the RDMA READs, RDMA WRITEs and store operations of requests of 128 KiB instead, in a
    /// cache of a sixteenth of the volume: fresh, and after random requests of 4 KiB.
    #[arg(long, conflicts_with_all = ["live", "instructions", "crc", "time"])]
    pub aged: bool,
    /// Measure the part of the blocks that reads find in a small cache instead, for several
    /// patterns of access.
    #[arg(long, conflicts_with_all = ["live", "instructions", "crc", "time", "aged"])]
    pub hit_ratio: bool,
    /// Running daemons.
    #[command(flatten)]
    pub live: live::LiveArgs,
}

impl CostArgs {
    /// Measures the chosen costs.
    pub fn run(&self) -> Result<Report> {
        let plan = self.plan()?;
        if let Some(calls) = self.crc_calls {
            crc::calls(plan.sizes.first().copied().unwrap_or_default(), calls, self.crc_called)?;
        }
        if self.crc {
            let sizes = if self.sizes.is_empty() { &crc::SIZES[..] } else { &plan.sizes };
            return Ok(Report { crcs: crc::measure(sizes)?, ..Report::default() });
        }
        if self.live.is_wanted() {
            return Ok(Report { live: live::measure(&self.live, &plan)?, ..Report::default() });
        }
        if self.aged {
            return Ok(Report { aged: aged::measure(self.seed)?, ..Report::default() });
        }
        if self.hit_ratio {
            return Ok(Report { hit_ratios: hit_ratio::measure(self.seed)?, ..Report::default() });
        }
        if self.time {
            return time::measure(&plan);
        }
        if !self.instructions {
            return rig::measure(&plan);
        }
        let instructions = instructions::measure(&plan, self.hottest)?;
        let dearest = instructions::dearest(&instructions);
        let report = Report {
            transport: rblk_fabric::Transport::SoftMemory.to_string(),
            queue_depth: plan.queue_depth,
            immediates: plan.immediates,
            in_capsule_bytes: plan.in_capsule_bytes,
            instructions,
            ..Report::default()
        };
        if let Some(most) = self.at_most {
            ensure!(
                dearest <= f64::from(most),
                "an engine takes {dearest:.0} instructions per I/O, more than {most}:\n{}",
                super::table(&report)
            );
        }
        Ok(report)
    }

    fn plan(&self) -> Result<Plan> {
        if let Some(plan) = &self.plan {
            return Ok(serde_json::from_str(plan)?);
        }
        let bytes = |size: &ByteSize| u32::try_from(size.0);
        let mut sizes = self.sizes.iter().map(bytes).collect::<Result<Vec<_>, _>>()?;
        if sizes.is_empty() {
            sizes.push(4 << 10);
            if !self.instructions && !self.time && !self.live.is_wanted() {
                sizes.push(128 << 10);
            }
        }
        Ok(Plan {
            ops: self.ops.clone(),
            sizes,
            depths: self.depths.clone(),
            queue_depth: self.queue_depth,
            ios: self.ios,
            volumes: self.volume.clone(),
            in_capsule_bytes: bytes(&self.inline)?,
            immediates: !self.no_immediates,
            lists: !self.no_lists,
            data_lists: !self.no_lists && !self.no_data_lists,
            data_first: !self.no_data_first,
            digests: self.digest,
            reads_out: self.reads_out,
            seed: self.seed,
        })
    }
}
