"""`fastgrpo doctor`: the layers of a run, one after the other, up to the first that is wrong."""
