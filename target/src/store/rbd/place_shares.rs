//! [`PlaceShares`]: the places of a poll group for ops of images, shared by its images. Pure.
//!
//! A cluster that does not answer keeps the ops of all its images. So half of the places are set
//! apart: each image has a share of them that no other image takes, and one share more is there for
//! an image that is added. The other half is for whoever comes first.

/// See the module.
#[derive(Debug)]
pub(super) struct PlaceShares {
    set_apart: usize,
    // Places for the ops beyond the shares.
    common: usize,
    // Places of one image.
    share: usize,
    // Ops beyond the shares.
    beyond: usize,
}

impl PlaceShares {
    /// Shares of so many places.
    pub(super) fn of(places: usize) -> Self {
        let set_apart = places / 2;
        Self { set_apart, common: places - set_apart, share: set_apart.max(1), beyond: 0 }
    }

    /// Images were added or removed. The others have so many ops.
    pub(super) fn share_anew(&mut self, images: impl Iterator<Item = usize> + Clone) {
        self.share = (self.set_apart / (images.clone().count() + 1)).max(1);
        self.beyond = images.map(|ops| ops.saturating_sub(self.share)).sum();
    }

    /// Whether an image with so many ops may have one more, if a place is free.
    pub(super) fn has_room(&self, ops: usize) -> bool {
        ops < self.share || self.beyond < self.common
    }

    /// An image with so many ops begins one more.
    pub(super) fn began(&mut self, ops: usize) {
        self.beyond += usize::from(ops >= self.share);
    }

    /// One of so many ops of an image has ended.
    pub(super) fn ended(&mut self, ops: usize) {
        self.beyond = self.beyond.saturating_sub(usize::from(ops > self.share));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images with ops that never end, over so many places.
    struct Stalled {
        shares: PlaceShares,
        ops: Vec<usize>,
        free: usize,
    }

    impl Stalled {
        fn with(places: usize, images: usize) -> Self {
            let mut all = Self { shares: PlaceShares::of(places), ops: Vec::new(), free: places };
            (0..images).for_each(|_| all.add());
            all
        }

        fn add(&mut self) {
            self.ops.push(0);
            self.shares.share_anew(self.ops.iter().copied());
        }

        fn begin(&mut self, image: usize) -> bool {
            let begins = self.free > 0 && self.shares.has_room(self.ops[image]);
            if begins {
                self.shares.began(self.ops[image]);
                self.ops[image] += 1;
                self.free -= 1;
            }
            begins
        }

        fn fill(&mut self, image: usize) -> usize {
            (0..).take_while(|_| self.begin(image)).count()
        }

        fn end(&mut self, image: usize) {
            self.shares.ended(self.ops[image]);
            self.ops[image] -= 1;
            self.free += 1;
        }
    }

    #[test]
    fn stalled_images_leave_places_for_the_others_and_for_one_that_is_added() {
        for images in [1, 2, 3, 7, 100] {
            let mut all = Stalled::with(1024, images);
            for stalled in 0..images - 1 {
                assert!(all.fill(stalled) > 0, "{images} images");
            }
            assert!(all.fill(images - 1) >= 512 / (images + 1), "{images} images");
            all.add();
            assert!(all.fill(images) > 0, "{images} images, and one that is added");
        }
    }

    #[test]
    fn one_busy_image_gets_most_places() {
        let mut all = Stalled::with(1024, 2);
        assert!(all.fill(0) > 600);
        // What it gives back comes to it again.
        (0..600).for_each(|_| all.end(0));
        assert_eq!(all.fill(0), 600);
        (0..all.ops[0]).for_each(|_| all.end(0));
        assert_eq!((all.free, all.shares.beyond), (1024, 0));
    }

    #[test]
    fn few_places_are_enough_for_each_image_in_turn() {
        let mut all = Stalled::with(1, 3);
        for image in [0, 1, 2] {
            assert_eq!(all.fill(image), 1);
            all.end(image);
        }
    }
}
