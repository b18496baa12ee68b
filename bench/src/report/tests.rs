use super::*;

#[test]
fn a_page_holds_the_run_whatever_is_in_it() {
    let mut run = Run::begin("r");
    run.place.host = "</script><b>".to_owned();
    let page = page(&run, "3: counted twice\n").unwrap();
    assert!(page.contains("<\\/script><b>") && page.contains("3: counted twice"));
    assert_eq!(page.matches("</script>").count(), 2);
    // The name of SVG is the only address in it.
    assert_eq!(page.matches("http").count(), page.matches("http://www.w3.org/2000/svg").count());
    assert!(!page.contains(PLACE));
}
