"""Named algorithms by family. A preset is a few lines: which factors differ, and where that is written down."""
