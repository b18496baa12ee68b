use super::*;

#[test]
fn names_are_taken_from_paths() {
    let text = "insmod /lib/modules/7.2/kernel/drivers/nvme/common/nvme-keyring.ko.xz \n\
                builtin x\ninsmod /lib/modules/7.2/kernel/drivers/nvme/target/nvmet.ko a=b\n";
    assert_eq!(insertions(text), ["nvme_keyring", "nvmet"]);
}
