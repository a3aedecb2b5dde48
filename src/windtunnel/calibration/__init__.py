"""What is measured on a machine so that twins can cost it: profiles are found, kept and fitted in one way."""
