// What Material adds once a page is drawn: boxes around wide tables, which the keyboard must reach, and a landmark
// without a name for each button that copies code.
const mend = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) box.tabIndex = 0;
  for (const buttons of document.querySelectorAll(".md-code__nav")) buttons.setAttribute("role", "none");
};
new MutationObserver(mend).observe(document.body, {childList: true, subtree: true});
mend();
