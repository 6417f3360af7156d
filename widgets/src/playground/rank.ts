// The place of a token among the model's choices, as a tint.

/** Step 0 (the first choice) to 3 (the eleventh or later). The legend prints the same limits. */
export function rankStep(rank: number): number {
  if (rank <= 1) return 0;
  if (rank <= 3) return 1;
  return rank <= 10 ? 2 : 3;
}
export const RANK_LABELS = ["1st", "2nd–3rd", "4th–10th", "11th or later"] as const;
