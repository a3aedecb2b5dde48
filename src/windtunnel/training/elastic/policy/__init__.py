"""What the supervisor of a run decides, pure: membership, agreements, who goes on."""
