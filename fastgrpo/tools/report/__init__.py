"""`fastgrpo report`: one or several runs as a table, a picture and a page."""
