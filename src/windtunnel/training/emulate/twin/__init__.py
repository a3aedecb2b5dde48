"""From slices and costs to the time that everything takes, by replaying the world of all ranks."""
