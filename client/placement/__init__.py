"""Changes to a compiled graph that keep CPU work from cutting it into parts; one file for each rule."""
