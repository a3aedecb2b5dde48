"""What every capability's bench is written with."""
