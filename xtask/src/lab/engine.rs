//! [`Engine`]: what runs the guest's CPUs, in the words of QEMU.

/// What QEMU is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Hardware virtualisation.
    Kvm,
    /// The translator, a thread per virtual CPU.
    Tcg,
    /// The translator, one thread.
    TcgSingle,
}

impl Engine {
    /// The value of QEMU's `-accel`.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Engine::Kvm => "kvm",
            Engine::Tcg => "tcg,thread=multi",
            Engine::TcgSingle => "tcg,thread=single",
        }
    }

    /// The value of QEMU's `-cpu`. The translator runs `rep movsb` byte by byte, a tenth as fast as
    /// `rep movsq`, which a kernel copies with on a CPU without "enhanced" `movsb`: without that, a
    /// copy costs beside the rest about what it does on a real machine. A fifth level of page
    /// tables, SMAP and SMEP cost it time in each page walk and each copy from or to a user, and
    /// protect nothing here.
    pub(crate) fn cpu(self) -> &'static str {
        match self {
            Engine::Kvm => "max",
            Engine::Tcg | Engine::TcgSingle => "max,-erms,-la57,-smap,-smep",
        }
    }
}
