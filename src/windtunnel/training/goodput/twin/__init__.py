"""The emulated world of a surviving job: days of failures on thousands of machines, under six ways to go
on."""
