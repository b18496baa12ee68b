use super::*;

#[test]
fn a_plot_that_is_measured_again_replaces_the_first() {
    let mut scale = Scale::default();
    let plot =
        |error: Option<&str>| ScalePlot { error: error.map(str::to_owned), ..empty("k", "t") };
    put(&mut scale, plot(Some("not here")));
    put(&mut scale, plot(None));
    assert_eq!(scale.plots, [plot(None)]);
}

#[test]
fn steps_grow_to_the_most() {
    assert_eq!(steps(100), [1, 10, 100]);
    assert_eq!(steps(30), [1, 10, 30]);
    assert_eq!(steps(1), [1]);
}
