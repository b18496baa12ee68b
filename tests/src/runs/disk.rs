//! [`Disk`]: the bytes of one volume, as they are in the memory of the process that serves it, in
//! the kernel, and on the disk.

use rblk_rig::seed::Random;

/// One place of a volume. A value is the number of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Cell {
    process: Option<u64>,
    kernel: u64,
    disk: u64,
    // The kernel gave up the value: no sync brings it to the disk.
    is_given_up: bool,
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Disk {
    cells: Vec<Cell>,
    loses: bool,
}

impl Disk {
    /// A disk of `cells` cells, all 0.
    #[must_use]
    pub fn new(cells: usize) -> Self {
        Self { cells: vec![Cell::default(); cells], loses: false }
    }

    /// Its size.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells.len()
    }

    /// Whether it has no cells.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// The value that a read finds.
    #[must_use]
    pub fn read(&self, at: usize) -> u64 {
        self.cells[at].process.unwrap_or(self.cells[at].kernel)
    }

    /// The value after any crash.
    #[must_use]
    pub fn durable(&self, at: usize) -> u64 {
        self.cells[at].disk
    }

    /// Writes into the memory of the process, or into the kernel.
    pub fn write(&mut self, at: usize, value: u64, write_back: bool) {
        let cell = &mut self.cells[at];
        if write_back {
            cell.process = Some(value);
        } else {
            *cell = Cell { process: None, kernel: value, is_given_up: false, ..*cell };
        }
    }

    /// Writes durably. Returns whether the value is durable.
    pub fn write_durably(&mut self, at: usize, value: u64) -> bool {
        if self.loses {
            self.write(at, value, false);
            return false;
        }
        self.cells[at] = Cell { kernel: value, disk: value, ..Cell::default() };
        true
    }

    /// Makes the next sync fail and lose its data.
    pub fn lose_next(&mut self) {
        self.loses = true;
    }

    /// Writes some values back, as the process and the kernel do in time.
    pub fn flow(&mut self, random: &mut Random) {
        for cell in &mut self.cells {
            if let Some(value) = cell.process.take_if(|_| random.chance(300)) {
                (cell.kernel, cell.is_given_up) = (value, false);
            }
            if !self.loses && !cell.is_given_up && random.chance(300) {
                cell.disk = cell.kernel;
            }
        }
    }

    /// Makes everything durable. Returns whether it is: a loss is reported once.
    pub fn sync(&mut self, random: &mut Random) -> bool {
        for cell in &mut self.cells {
            if let Some(value) = cell.process.take() {
                (cell.kernel, cell.is_given_up) = (value, false);
            }
            if self.loses && cell.kernel != cell.disk {
                // The page keeps its value, or is read from the disk again.
                cell.is_given_up = true;
                cell.kernel = if random.chance(500) { cell.kernel } else { cell.disk };
            } else if !cell.is_given_up {
                cell.disk = cell.kernel;
            }
        }
        !std::mem::take(&mut self.loses)
    }

    /// The process has ended.
    pub fn end_process(&mut self) {
        self.cells.iter_mut().for_each(|cell| cell.process = None);
    }

    /// The machine has lost its power.
    pub fn cut(&mut self) {
        for cell in &mut self.cells {
            *cell = Cell { kernel: cell.disk, disk: cell.disk, ..Cell::default() };
        }
        self.loses = false;
    }

    /// Another size.
    pub fn resize(&mut self, cells: usize) {
        self.cells.resize(cells, Cell::default());
    }
}
